// FP8 codes and their scales, which the formats "fp8" and "modelopt" share.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/formats/format.h"

namespace awqd {

// Which elements of W share a scale.
struct Fp8Scales {
  enum class Kind {
    kTensorOrColumn,  // [] or [1]: one for all; [N] or [N, 1]: one per out feature
    kBlocks,          // [N / block_n, K / block_k], rounded up
  };
  absl::string_view name;  // of the tensor
  Kind kind = Kind::kTensorOrColumn;
  int64_t block_n = 0;
  int64_t block_k = 0;
  bool e8m0 = false;  // whether they may be powers of two of one byte
};

// The tensors "weight" E4M3 [N, K], `scales` and "bias". Every scale multiplies.
absl::StatusOr<HostWeight> DecodeFp8(const Fp8Scales& scales, const LinearTensors& tensors);

}  // namespace awqd
