// Names of the shared enumerations, as they appear in logs, errors and the API.
#include "kernels/types.h"

namespace awqd {
namespace {

// `names` in the order of the enumeration.
template <size_t kCount, typename Enum>
absl::string_view NameIn(const absl::string_view (&names)[kCount], Enum value) {
  const auto index = static_cast<size_t>(value);
  return index < kCount ? names[index] : "unknown";
}

}  // namespace

absl::string_view Name(DType dtype) {
  return NameIn({"FP16", "BF16", "FP32", "INT8", "UINT8", "INT32", "E4M3", "E8M0"}, dtype);
}

absl::string_view Name(CpuIsa isa) {
  return NameIn({"portable", "neon", "neondot", "avx2", "avxvnni", "avx512", "avx512vnni", "amx"},
                isa);
}

absl::string_view Name(ActivationFunction activation) {
  return NameIn({"none", "relu", "gelu", "silu", "gelu_tanh", "swiglu_oai", "situ"}, activation);
}

absl::string_view Name(Path path) { return NameIn({"fused", "dequantize"}, path); }

}  // namespace awqd
