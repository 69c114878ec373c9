// Log-linear buckets.
#include "client/bench/histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace awqd::bench {
namespace {

constexpr int kSubBits = 7;
constexpr int64_t kLinear = int64_t{2} << kSubBits;
constexpr int64_t kMax = int64_t{1} << 41;

size_t IndexOf(int64_t value) {
  if (value < kLinear) return static_cast<size_t>(value);
  const int shift = std::bit_width(static_cast<uint64_t>(value)) - (kSubBits + 1);
  return (static_cast<size_t>(shift) << kSubBits) + static_cast<size_t>(value >> shift);
}

// The largest value of a bucket.
int64_t EdgeOf(size_t index) {
  if (index < static_cast<size_t>(kLinear)) return static_cast<int64_t>(index);
  const int shift = static_cast<int>(index >> kSubBits) - 1;
  const int64_t step = static_cast<int64_t>(index) - (int64_t{shift} << kSubBits);
  return ((step + 1) << shift) - 1;
}

}  // namespace

Histogram::Histogram() : buckets_(IndexOf(kMax) + 1, 0) {}

void Histogram::Add(int64_t value_ns) {
  const int64_t value = std::clamp(value_ns, int64_t{0}, kMax);
  ++buckets_[IndexOf(value)];
  ++count_;
  max_ = std::max(max_, value);
  sum_ += static_cast<double>(value);
}

void Histogram::Merge(const Histogram& other) {
  for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i] += other.buckets_[i];
  count_ += other.count_;
  max_ = std::max(max_, other.max_);
  sum_ += other.sum_;
}

double Histogram::mean_ns() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }

int64_t Histogram::QuantileNs(double share) const {
  if (count_ == 0) return 0;
  const auto wanted =
      std::max(int64_t{1}, static_cast<int64_t>(std::ceil(share * static_cast<double>(count_))));
  int64_t seen = 0;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    seen += buckets_[i];
    if (seen >= wanted) return std::min(EdgeOf(i), max_);
  }
  return max_;
}

}  // namespace awqd::bench
