// Integer arithmetic that must not wrap: rounding, checked products of shapes and sizes.
#pragma once

#include <cstdint>
#include <optional>

namespace awqd {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// a * b, or nullopt if the product overflows or a factor is negative.
constexpr std::optional<int64_t> CheckedMul(int64_t a, int64_t b) {
  int64_t out = 0;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

}  // namespace awqd
