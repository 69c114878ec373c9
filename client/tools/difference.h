// Sums over elements that differ, which diff, quantize and convert share.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/diff.h"
#include "client/tools/elements.h"

namespace awqd::tools {

// Collects elements of two matrices of one shape.
class Difference {
 public:
  explicit Difference(int64_t worst) : most_(worst) {}

  void Add(int64_t k, int64_t n, float a, float b);

  int64_t different() const { return different_; }
  double largest() const { return largest_; }
  // |A - B| / |B|; 0 only where nothing differs.
  double relative() const;
  const std::vector<DifferentElement>& worst() const { return worst_; }

 private:
  void Keep(const DifferentElement& element);

  int64_t most_;
  int64_t different_ = 0;
  double largest_ = 0, sum_ = 0, norm_ = 0;  // of squares
  std::vector<DifferentElement> worst_;
};

// Every element of two of one shape, with the `worst` kept.
absl::StatusOr<Difference> Compare(const Elements& a, const Elements& b, int64_t worst = 0);

// |a - b|; infinite where just one is NaN, or an infinity meets another number. 0 of two NaNs.
inline double Distance(float a, float b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double distance = std::fabs(static_cast<double>(a) - static_cast<double>(b));
  return std::isnan(distance) ? HUGE_VAL : distance;
}

}  // namespace awqd::tools
