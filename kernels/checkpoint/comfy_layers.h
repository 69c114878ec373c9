// The layers that ComfyUI quantised, as its single files tell of them: in tensors and in the header.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/checkpoint/file.h"
#include "kernels/formats/format.h"

namespace awqd::model {

// The end of the name of a file of safetensors.
inline constexpr absl::string_view kSafetensorsExtension = ".safetensors";

// Whether the header tells of such layers. Reads no tensor.
bool HasComfyLayers(const TensorFile& file);

// The settings of every layer, from
//   - "_quantization_metadata" of the header, where paths may lack the prefix of a diffusion model;
//     it counts where the next says something else
//   - "PATH.comfy_quant", a tensor of JSON
//   - "PATH.scale_weight" beside codes, in files of 2025
//   - with `alone`, a "PATH.weight" of F8_E4M3 without scales, whose numbers are the weight's
// Codes without any of these have a rule that says so. Nothing where there is none of them.
// INVALID_ARGUMENT for metadata that cannot be read; UNAVAILABLE once `cancelled`.
absl::StatusOr<std::optional<FoundFormat>> FindComfyLayers(
    absl::Span<const std::shared_ptr<const TensorFile>> files,
    const std::map<absl::string_view, TensorLocation>& tensors, bool alone,
    const std::atomic<bool>* cancelled = nullptr);

}  // namespace awqd::model
