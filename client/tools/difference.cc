// Norms and the worst elements.
#include "client/tools/difference.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/base/status.h"

namespace awqd::tools {

void Difference::Keep(const DifferentElement& element) {
  const auto before = [](const DifferentElement& x, const DifferentElement& y) {
    return Distance(x.a, x.b) > Distance(y.a, y.b);
  };
  worst_.insert(std::upper_bound(worst_.begin(), worst_.end(), element, before), element);
  if (static_cast<int64_t>(worst_.size()) > most_) worst_.pop_back();
}

void Difference::Add(int64_t k, int64_t n, float a, float b) {
  if (std::isfinite(b)) norm_ += static_cast<double>(b) * b;
  if (std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b)) return;
  if (std::isnan(a) && std::isnan(b)) return;
  ++different_;
  const double distance = Distance(a, b);
  sum_ += distance * distance;
  largest_ = std::max(largest_, distance);
  const bool full = static_cast<int64_t>(worst_.size()) == most_;
  if (!full || (most_ > 0 && distance > Distance(worst_.back().a, worst_.back().b))) {
    Keep({k, n, a, b});
  }
}

absl::StatusOr<Difference> Compare(const Elements& a, const Elements& b, int64_t worst) {
  Difference out(worst);
  const int64_t step = a.Step();
  std::vector<float> left(step * a.k()), right(step * a.k());
  for (int64_t begin = 0; begin < a.n(); begin += step) {
    const int64_t end = std::min(a.n(), begin + step), columns = end - begin;
    AWQD_RETURN_IF_ERROR(a.Read(begin, end, left.data()));
    AWQD_RETURN_IF_ERROR(b.Read(begin, end, right.data()));
    for (int64_t k = 0; k < a.k(); ++k) {
      for (int64_t col = 0; col < columns; ++col) {
        const int64_t at = k * columns + col;
        out.Add(k, begin + col, left[at], right[at]);
      }
    }
  }
  return out;
}

double Difference::relative() const {
  if (sum_ == 0) return 0;
  return std::max(std::sqrt(sum_ / norm_), std::numeric_limits<double>::denorm_min());
}

}  // namespace awqd::tools
