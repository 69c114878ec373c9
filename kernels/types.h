// Plain value types that every room shares: element types, matrix views, properties of devices.
// CUDA is not used here.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "absl/strings/string_view.h"
#include "kernels/base/float8.h"
#include "kernels/base/half.h"

namespace awqd {

// E4M3 has 4 bits of exponent and 3 of mantissa, E8M0 is a power of two. Both are types of scales;
// kernels also multiply activations that were rounded to E4M3.
enum class DType : uint8_t { kFp16, kBf16, kFp32, kInt8, kUint8, kInt32, kE4m3, kE8m0 };

// Bytes of one element.
constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFp16:
    case DType::kBf16:
      return 2;
    case DType::kFp32:
    case DType::kInt32:
      return 4;
    case DType::kInt8:
    case DType::kUint8:
    case DType::kE4m3:
    case DType::kE8m0:
      return 1;
  }
  return 0;
}

// Element `index` of a floating-point type, or of a type of scales, exactly. The data need no
// alignment, because neither safetensors files nor messages align their tensors.
inline float LoadElement(const void* data, DType dtype, int64_t index) {
  const auto* at = static_cast<const uint8_t*>(data) + index * SizeOf(dtype);
  if (SizeOf(dtype) == 1) {
    if (dtype == DType::kE4m3) return E4m3ToFloat(*at);
    return dtype == DType::kE8m0 ? E8m0ToFloat(*at) : static_cast<float>(static_cast<int8_t>(*at));
  }
  if (dtype == DType::kFp32) {
    float value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return dtype == DType::kFp16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
}

// "FP16", "BF16", "FP32", "INT8", "UINT8", "INT32", "E4M3", "E8M0".
absl::string_view Name(DType dtype);

constexpr bool IsFloating(DType dtype) {
  return dtype == DType::kFp16 || dtype == DType::kBf16 || dtype == DType::kFp32;
}

// Sets of element types, for the types that a registry row accepts.
using DTypeMask = uint32_t;
constexpr DTypeMask MaskOf(DType dtype) { return 1u << static_cast<int>(dtype); }
constexpr DTypeMask kFloatingMask =
    MaskOf(DType::kFp16) | MaskOf(DType::kBf16) | MaskOf(DType::kFp32);

// A row-major matrix somewhere in a device's memory; row stride = cols. Does not own.
template <typename Byte>
struct BasicMatrixView {
  Byte* data = nullptr;
  DType dtype = DType::kFp16;
  int64_t rows = 0;
  int64_t cols = 0;
};
using MatrixView = BasicMatrixView<void>;
using ConstMatrixView = BasicMatrixView<const void>;

// Functions applied to a product's result before it is rounded. kGelu is the exact one, with erf.
// kSwigluOai and kSitu are functions of gate and up, of gated MLPs alone. exact.h has the formulas.
enum class ActivationFunction : uint8_t {
  kNone,
  kRelu,
  kGelu,
  kSilu,
  kGeluTanh,
  kSwigluOai,
  kSitu
};
absl::string_view Name(ActivationFunction activation);  // "none", "gelu_tanh"

// The constants of a gated MLP's activation function.
struct GateParameters {
  float limit = std::numeric_limits<float>::infinity();  // of gate, and of up on either side
  float alpha = 0;                                       // kSwigluOai
  float beta = 0, linear_beta = 0;                       // kSitu; linear_beta 0: up is as it is

  friend bool operator==(const GateParameters&, const GateParameters&) = default;
};

// How floating activations x are rounded to 8 bits before a product: x is about scale * q, with q in
// INT8 or in E4M3. kernels/steps.h has the formulas.
enum class ActivationQuantization : uint8_t {
  kNone,            // not rounded
  kPerToken,        // scale = max |x| / 127 of the token, q in [-127, 127]
  kStatic,          // scale is given by the caller, q in [-128, 127]
  kFloat8PerToken,  // E4M3, scale = max |x| / 448 of the token
  kFloat8PerBlock,  // E4M3, scale = max |x| / 448 of a token's block of 128 in-features
  kFloat8Static,    // E4M3, scale is given by the caller
};
constexpr bool IsFloat8(ActivationQuantization how) {
  return how >= ActivationQuantization::kFloat8PerToken;
}
// Whether the caller gives the scales.
constexpr bool HasGivenScales(ActivationQuantization how) {
  return how == ActivationQuantization::kStatic || how == ActivationQuantization::kFloat8Static;
}

enum class DeviceKind : uint8_t { kCpu, kCuda };

// The instruction set of the CPU rows. Within one architecture each includes those before it,
// except kAvxVnni. kNeon is for aarch64, and kNeonDot adds its dot products of bytes. kAvx2 means
// AVX2, FMA and F16C. kAvxVnni adds AVX-VNNI, which machines with AVX-512 may lack. kAvx512 means
// AVX-512 F, BW, DQ and VL; kAvx512Vnni adds VNNI, and kAmx adds AMX-INT8.
enum class CpuIsa : uint8_t {
  kPortable,
  kNeon,
  kNeonDot,
  kAvx2,
  kAvxVnni,
  kAvx512,
  kAvx512Vnni,
  kAmx
};
absl::string_view Name(CpuIsa isa);

// The properties of a device by which kernels are chosen. Plain data, so that tests can invent
// devices.
struct DeviceInfo {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  std::string id;    // "cpu", "cuda:0"
  std::string name;  // "NVIDIA H100 80GB HBM3"
  int64_t memory_bytes = 0;
  // CPU
  int threads = 1;
  CpuIsa isa = CpuIsa::kPortable;
  // Compute capability x 10 (80, 90): the GPU's, or a lower one that the compiled code or
  // AWQD_CUDA_ARCH allows.
  int arch = 0;
  int sm_count = 0;
  int64_t l2_bytes = 0;
  // The GPU's maximum clock; 0: the driver does not report it.
  int64_t sm_clock_khz = 0;
  int64_t memory_bytes_per_s = 0;
  std::string pci_bus_id;  // "0000:1b:00.0", as management tools name it; empty: unknown
  int64_t shared_bytes_per_block = 0;  // opt-in maximum
  // Why the dense path cannot run here, such as a missing cuBLASLt; empty if it can.
  std::string dense_unavailable;
  // Allow only rows that compute a token alike in every batch (DeviceOptions).
  bool batch_invariant = false;
};

// How a product is computed: by one kernel that decodes and multiplies, or by decoding first and a
// dense product afterwards.
enum class Path : uint8_t { kFused, kDequantize };
absl::string_view Name(Path path);  // "fused", "dequantize"

}  // namespace awqd
