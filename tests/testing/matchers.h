// Comparisons that kernel tests share: relative Frobenius error, equality of bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "tests/testing/random_weight.h"

namespace awqd::testing {

// ||got - want|| / ||want||; infinite if `got` has a NaN or an infinity where `want` has none.
inline double FrobeniusError(const std::vector<uint8_t>& got, DType dtype,
                             const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = GetElement(got, dtype, static_cast<int64_t>(i)) - want[i];
    if (!std::isfinite(difference)) return HUGE_VAL;
    error += difference * difference;
    norm += want[i] * want[i];
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

// The largest error of a product, by its output type.
inline double ProductTolerance(DType output, DType input) {
  return output == DType::kBf16 || input == DType::kBf16 ? 8e-3 : 1e-3;
}

MATCHER(IsOk, "is OK") {
  *result_listener << arg.ToString();
  return arg.ok();
}

// Index of the first byte that differs, or -1.
inline int64_t FirstDifference(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  if (a.size() != b.size()) return static_cast<int64_t>(std::min(a.size(), b.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace awqd::testing
