// Reading and writing one element of a matrix whatever its type: for code where speed is no object.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/base/half.h"
#include "kernels/types.h"

namespace awqd {

// Element `index` of floating-point data, exactly.
inline float LoadElement(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kFp32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == DType::kFp16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
}

// A float that rounds to any narrower type just as `value` does. Rounding twice to nearest would be
// wrong near ties; a first rounding to odd keeps what the second needs to know.
inline float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || nearest - nearest != 0) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const double magnitude = value < 0 ? -value : value;
  const double got = nearest < 0 ? -static_cast<double>(nearest) : nearest;
  if (got > magnitude) --bits;
  return std::bit_cast<float>(bits | 1u);
}

// One rounding of `value` to the element type.
inline void StoreElement(void* data, DType dtype, int64_t index, double value) {
  if (dtype == DType::kFp32) {
    static_cast<float*>(data)[index] = static_cast<float>(value);
  } else {
    static_cast<uint16_t*>(data)[index] =
        dtype == DType::kFp16 ? FloatToHalf(RoundToOdd(value)) : FloatToBf16(RoundToOdd(value));
  }
}

}  // namespace awqd
