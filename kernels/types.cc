// Names of the shared enumerations, as they appear in logs, errors and the API.
#include "kernels/types.h"

namespace awqd {

absl::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kFp16:
      return "FP16";
    case DType::kBf16:
      return "BF16";
    case DType::kFp32:
      return "FP32";
    case DType::kInt8:
      return "INT8";
    case DType::kUint8:
      return "UINT8";
    case DType::kInt32:
      return "INT32";
  }
  return "unknown";
}

absl::string_view Name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable:
      return "portable";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

absl::string_view Name(Path path) { return path == Path::kFused ? "fused" : "dequantize"; }

}  // namespace awqd
