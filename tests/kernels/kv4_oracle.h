// KV4's definition in double, element by element, with each of its roundings written out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/base/half.h"
#include "kernels/exact.h"
#include "kernels/kv4.h"

namespace awqd::testing {

struct OracleScale {
  float scale = 1, zero = 0;
};

// One FP32 rounding of a result that double holds exactly, or accurately enough: a sum, product or
// quotient of floats rounds the same through double as directly.
inline float Fp32(double value) { return static_cast<float>(value); }

inline float ToScale(float value, DType dtype) {
  return dtype == DType::kFp16 ? HalfToFloat(FloatToHalf(value)) : value;
}

inline OracleScale OracleScaleOf(const std::vector<float>& row, DType dtype) {
  const bool fp16 = dtype == DType::kFp16;
  const double reach = fp16 ? 491280 : 0x1p123, smallest = fp16 ? 0x1p-24 : 0x1p-126;
  const double largest = fp16 ? 65504 : 0x1.fffffep127;
  double min = HUGE_VAL, max = -HUGE_VAL;
  for (float v : row) {
    if (!std::isfinite(v)) continue;
    min = std::min<double>(min, v);
    max = std::max<double>(max, v);
  }
  if (min > max) return {};
  const double c = Fp32(Fp32(0.5 * min) + static_cast<double>(Fp32(0.5 * max)));
  min = std::clamp(min, -reach, reach);
  max = std::clamp(max, -reach, reach);
  const double width = Fp32(max - min);
  const float zero = ToScale(Fp32(Fp32(-15 * min) / width), dtype);
  if (std::isfinite(zero)) {
    return {ToScale(Fp32(std::max<double>(Fp32(width / 15), smallest)), dtype), zero};
  }
  if (c == 0) return {};
  const bool beyond = std::fabs(c) > largest;
  const double size = std::min<double>(beyond ? Fp32(std::fabs(c) / 15) : std::fabs(c), largest);
  return {ToScale(Fp32(std::max(size, smallest)), dtype), c > 0 ? 0.0f : beyond ? 15.0f : 1.0f};
}

inline int OracleCode(float x, float scale, float zero) {
  const double product = Fp32(static_cast<double>(x) * Fp32(1 / static_cast<double>(scale)));
  const double real = Fp32(product + zero);
  if (std::isnan(real)) return 0;
  return static_cast<int>(std::nearbyint(std::clamp(real, 0.0, 15.0)));
}

// Writes element `index` of `out`.
inline void OracleElement(int code, float scale, float zero, Kv4Form form, DType dtype,
                          int64_t index, std::vector<uint8_t>* out) {
  double value = Fp32(static_cast<double>(Fp32(static_cast<double>(code) - zero)) * scale);
  if (form == Kv4Form::kFused) {
    const double half = HalfToFloat(FloatToHalf(scale));
    const double offset = HalfToFloat(FloatToHalf(Fp32(-static_cast<double>(scale) * zero)));
    value = code * half + offset;  // at most 45 bits: exact
  }
  StoreElement(out->data(), dtype, index, value);
}

}  // namespace awqd::testing
