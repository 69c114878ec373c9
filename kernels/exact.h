// The reference arithmetic of a weight and of activation functions. Kernels compute the same in
// other ways, and tests compare them.
//
//   d = decode(code) - zero        kConstant, kStored, kRealBefore
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

// The value of a code: an integer, or an element of E2M1, E4M3 or the weight's `table`.
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
  }
  return 0;
}

// An activation function, in FP32.
inline float ActivateFloat(ActivationFunction activation, float v) {
  switch (activation) {
    case ActivationFunction::kNone:
      return v;
    case ActivationFunction::kRelu:
      return v < 0 ? 0 : v;
    case ActivationFunction::kGelu:
      return 0.5f * v * std::erfc(v * -0.70710678f);
    case ActivationFunction::kSilu:
      return v / (1 + std::exp(-v));
  }
  return v;
}

// Element w of stored row `row` and column `col`, in [0, K) and [0, N).
float WeightValue(const HostWeight& weight, int64_t row, int64_t col);

}  // namespace awqd
