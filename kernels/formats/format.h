// Format: how a checkpoint spells a quantised linear. Load time only, host only.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/weight.h"

namespace awqd {

// A tensor as a file or a request holds it. Does not own its bytes.
struct TensorView {
  std::string dtype;           // safetensors spelling: "I32", "F16", "BF16", "F32", ...
  std::vector<int64_t> shape;  // row-major
  absl::Span<const uint8_t> bytes;
};

// What config.json says about quantisation, in the field's common words whatever the format calls
// them.
struct QuantConfig {
  std::string quant_method;  // "awq"
  std::string version;       // "gemm", "gemv", ... lower case; may be empty
  int bits = 0;
  int64_t group_size = 0;  // -1: the whole of K; 0: not said
  bool zero_point = true;
  std::vector<std::string> modules_to_not_convert;  // substring match on a module's path
};

// The tensors of one quantised linear by their suffix: "qweight", "qzeros", "scales", "bias".
using LinearTensors = std::map<std::string, TensorView, std::less<>>;

struct Format {
  absl::string_view name;  // as quantization_config.quant_method names it

  // Empty when this format reads checkpoints with that config, else the reason why not.
  std::string (*refuses)(const QuantConfig& config);

  // Suffixes of the tensors that make up one linear; the first one marks a linear as quantised.
  absl::Span<const absl::string_view> suffixes;
  // Of those, the ones that may be missing.
  absl::Span<const absl::string_view> optional_suffixes;

  // Decodes one linear. INVALID_ARGUMENT naming the tensor (suffix), what was found and what was
  // expected.
  absl::StatusOr<CanonicalWeight> (*decode)(const QuantConfig& config,
                                            const LinearTensors& tensors);
};

// Every format, in the order they are tried.
absl::Span<const Format* const> AllFormats();

// The first format that accepts the config. UNIMPLEMENTED with what was found and every reason of
// refusal.
absl::StatusOr<const Format*> FindFormat(const QuantConfig& config);

}  // namespace awqd
