// Plain value types that every room shares: element types, matrix views, device facts. No CUDA
// here.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"
#include "kernels/base/float8.h"
#include "kernels/base/half.h"

namespace awqd {

// E4M3 and E8M0 are types of scales alone: the first has 4 bits of exponent and 3 of mantissa, the
// second is a power of two.
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

// Element `index` of a floating-point type, or of a type that a scale has, exactly. At any
// alignment: neither safetensors files nor messages align their tensors.
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

// Sets of element types, as the registry states what a row takes.
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

// What a product's result may pass through before it is rounded. GELU is the exact one, by erf.
enum class ActivationFunction : uint8_t { kNone, kRelu, kGelu, kSilu };
absl::string_view Name(ActivationFunction activation);  // "none", "relu", "gelu", "silu"

// How floating activations x become INT8 before a product: x is about scale * q.
enum class ActivationQuantization : uint8_t {
  kNone,      // they do not
  kPerToken,  // scale = max |x| / 127 of the token, q in [-127, 127]; see kernels/steps.h
  kStatic,    // scale is the caller's, q in [-128, 127]
};

enum class DeviceKind : uint8_t { kCpu, kCuda };

// Instruction set that the CPU rows dispatch on; of one architecture each includes the ones before,
// but for kAvxVnni. kNeon is aarch64's, kNeonDot has its dot products of bytes as well. kAvx2 means
// AVX2, FMA and F16C; kAvxVnni has AVX-VNNI as well, which machines with AVX-512 may lack. kAvx512
// means AVX-512 F, BW, DQ and VL as well; kAvx512Vnni is AVX-512 with VNNI, kAmx has AMX-INT8
// beside it.
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

// What kernels are chosen by. Plain data, so that tests can invent devices.
struct DeviceInfo {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  std::string id;    // "cpu", "cuda:0"
  std::string name;  // "NVIDIA H100 80GB HBM3"
  int64_t memory_bytes = 0;
  // CPU
  int threads = 1;
  CpuIsa isa = CpuIsa::kPortable;
  // CUDA
  // Compute capability x 10 (80, 90): the GPU's, or less where the code for it or AWQD_CUDA_ARCH
  // has less.
  int arch = 0;
  int sm_count = 0;
  int64_t l2_bytes = 0;
  // The most that the GPU is made for; 0: the driver does not tell.
  int64_t sm_clock_khz = 0;
  int64_t memory_bytes_per_s = 0;
  std::string pci_bus_id;  // "0000:1b:00.0", as management tools name it; empty: unknown
  int64_t shared_bytes_per_block = 0;  // opt-in maximum
  // Why the dense path cannot run here (cuBLASLt missing, say); empty when it can.
  std::string dense_unavailable;
  // Only rows that compute a token alike in every batch may serve (DeviceOptions).
  bool batch_invariant = false;
};

// How a product is computed: one kernel that decodes and multiplies, or decode first, then a dense
// product.
enum class Path : uint8_t { kFused, kDequantize };
absl::string_view Name(Path path);  // "fused", "dequantize"

}  // namespace awqd
