// The reference arithmetic of a weight and of activation functions. Kernels compute the same, most
// in other ways, and tests compare them.
//
//   d = decode(code) - zero        kConstant, kStored, kRealBefore; of vector codes decode(code)
//                                  has its scale, exactly; of a trellis it is transformed
//   p = d * scale
//   p = decode(code) * scale - zero    kRealAfter, a product and a difference
//   w = p * outer
//
// Each operation is one FP32 rounding to nearest even, in this order, and Dequantize rounds w once
// more to its output type. For integers, and for the product of an integer of up to 9 bits and an
// FP16 or BF16 scale, the FP32 result is exact, and Dequantize is one rounding of it.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/base/float8.h"
#include "kernels/base/half.h"
#include "kernels/weight.h"

namespace awqd {

// A float that rounds to any narrower type just as `value` does. Rounding to nearest twice would be
// wrong near ties; rounding to odd first keeps the information that the second rounding needs.
inline float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || nearest - nearest != 0) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const double magnitude = value < 0 ? -value : value;
  const double got = nearest < 0 ? -static_cast<double>(nearest) : nearest;
  if (got > magnitude) --bits;
  return std::bit_cast<float>(bits | 1u);
}

// Stores `value`, rounded once to the element type.
inline void StoreElement(void* data, DType dtype, int64_t index, double value) {
  if (dtype == DType::kFp32) {
    static_cast<float*>(data)[index] = static_cast<float>(value);
  } else {
    static_cast<uint16_t*>(data)[index] =
        dtype == DType::kFp16 ? FloatToHalf(RoundToOdd(value)) : FloatToBf16(RoundToOdd(value));
  }
}

// The value of a code of a single element: an integer, or an element of E2M1, E4M3 or the weight's
// `table`.
inline float DecodeCode(CodeKind kind, const float* table, int code) {
  switch (kind) {
    case CodeKind::kUnsigned:
      return static_cast<float>(code);
    case CodeKind::kE2m1:
      return E2m1ToFloat(static_cast<uint8_t>(code));
    case CodeKind::kE4m3:
      return E4m3ToFloat(static_cast<uint8_t>(code));
    case CodeKind::kTable:
      return table[code % 16];
    case CodeKind::kVector:
    case CodeKind::kTrellis:
      break;
  }
  return 0;
}

// Multiplies a block of activations [size] by the matrix of the transform, in place: butterflies of
// distance 1, 2, 4, ..., size / 2, then the scale, each operation one FP32 rounding. With `width`
// elements [size, width] it does so for each column: of a weight, whose rows it transforms.
inline void TransformBlock(const Hadamard& hadamard, float* block, int64_t width = 1) {
  const int64_t count = hadamard.size * width;
  for (int64_t apart = width; apart < count; apart *= 2) {
    for (int64_t begin = 0; begin < count; begin += 2 * apart) {
      float* const a = block + begin;
      float* const b = a + apart;
      for (int64_t i = 0; i < apart; ++i) {
        const float sum = a[i] + b[i], difference = a[i] - b[i];
        a[i] = sum;
        b[i] = difference;
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) block[i] *= hadamard.scale;
}

// The transform of a trellis: of 128 columns of a row.
inline constexpr Hadamard kTrellisTransform = {kTrellisColumns, kTrellisScale};

// A block of a trellis before `outer`: 16 rows of 128 columns, of which `tiles` is the first tile,
// to out[column * 16 + row].
void DecodeTrellis(const QuantizationScheme& scheme, const uint8_t* tiles, float* out);

// Kernels on GPUs compute these functions with the same expressions.
#ifdef __CUDACC__
#define AWQD_EXACT_FN __host__ __device__ __forceinline__
#else
#define AWQD_EXACT_FN inline
#endif

// An activation function of one number, in FP32.
AWQD_EXACT_FN float ActivateFloat(ActivationFunction activation, float v) {
  switch (activation) {
    case ActivationFunction::kNone:
      return v;
    case ActivationFunction::kRelu:
      return v < 0 ? 0 : v;
    case ActivationFunction::kGelu:
      return 0.5f * v * std::erfc(v * -0.70710678f);
    case ActivationFunction::kSilu:
      return v / (1 + std::exp(-v));
    case ActivationFunction::kGeluTanh:
      return 0.5f * v * (1 + std::tanh(0.7978846f * (v + 0.044715f * v * v * v)));
    default:
      return v;
  }
}

// One element between the products of a gated MLP, in FP32:
//   kSwigluOai  g * sigmoid(alpha * g) * (u + 1)           as GptOssExperts of transformers
//   kSitu       beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)
//               as situ of Megatron Core, for both halves
//   others      ActivateFloat(g) * u
// where g is min(gate, limit) and u is up clamped to -limit .. limit. NaN stays NaN.
AWQD_EXACT_FN float GateFloat(ActivationFunction activation, const GateParameters& parameters,
                              float gate, float up) {
  if (activation == ActivationFunction::kSitu) {
    const float beta = parameters.beta, linear = parameters.linear_beta;
    const float u = linear == 0 ? up : linear * std::tanh(up / linear);
    return beta * std::tanh(gate / beta) / (1 + std::exp(-gate)) * u;
  }
  const float limit = parameters.limit;
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  if (activation == ActivationFunction::kSwigluOai) {
    return g / (1 + std::exp(-parameters.alpha * g)) * (u + 1);
  }
  return ActivateFloat(activation, g) * u;
}

// Element w of stored row `row` and column `col`, in [0, K) and [0, N).
float WeightValue(const HostWeight& weight, int64_t row, int64_t col);

}  // namespace awqd
