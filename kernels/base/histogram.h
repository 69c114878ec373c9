// Histogram: counts values between fixed bounds, cheaply enough for every request.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "absl/types/span.h"

namespace awqd {

// The counts of a histogram at one moment. Values have the unit that Observe was given.
struct HistogramData {
  absl::Span<const int64_t> bounds;  // inclusive upper bounds, rising
  std::vector<int64_t> counts;       // one for each bound, and one for values above the last bound
  int64_t sum = 0;

  int64_t total() const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

  // Adds the counts of `other`, which has the same bounds or is empty.
  void Merge(const HistogramData& other) {
    if (counts.empty()) {
      *this = other;
      return;
    }
    for (size_t i = 0; i < other.counts.size(); ++i) counts[i] += other.counts[i];
    sum += other.sum;
  }

  // The counts since `before`, which is an earlier state of the same histogram, or empty.
  HistogramData Since(const HistogramData& before) const {
    HistogramData out = *this;
    for (size_t i = 0; i < before.counts.size(); ++i) out.counts[i] -= before.counts[i];
    out.sum -= before.sum;
    return out;
  }

  // The value at quantile `q`, from 0 to 1, interpolated linearly within a bucket. 0 without
  // values; the last bound where the quantile lies above it.
  double Quantile(double q) const {
    const int64_t values = total();
    if (values == 0) return 0;
    const double wanted = q * static_cast<double>(values);
    double before = 0;
    for (size_t i = 0; i < bounds.size(); ++i) {
      const auto count = static_cast<double>(counts[i]);
      if (before + count >= wanted && count > 0) {
        const double low = i == 0 ? 0 : static_cast<double>(bounds[i - 1]);
        return low + (static_cast<double>(bounds[i]) - low) * (wanted - before) / count;
      }
      before += count;
    }
    return static_cast<double>(bounds.back());
  }
};

// Thread-safe. Observe searches the bounds and makes two relaxed additions.
class Histogram {
 public:
  // `bounds` rise and outlive this histogram and its data, as the constants below do.
  explicit Histogram(absl::Span<const int64_t> bounds)
      : bounds_(bounds), counts_(new std::atomic<int64_t>[bounds.size() + 1] {}) {}

  void Observe(int64_t value) {
    const auto bound = std::lower_bound(bounds_.begin(), bounds_.end(), value);
    counts_[bound - bounds_.begin()].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
  }

  HistogramData data() const {
    HistogramData out = {.bounds = bounds_, .sum = sum_.load(std::memory_order_relaxed)};
    for (size_t i = 0; i <= bounds_.size(); ++i) {
      out.counts.push_back(counts_[i].load(std::memory_order_relaxed));
    }
    return out;
  }

 private:
  const absl::Span<const int64_t> bounds_;
  const std::unique_ptr<std::atomic<int64_t>[]> counts_;
  std::atomic<int64_t> sum_{0};
};

// Nanoseconds, from 10 us to 50 s: requests and their steps.
inline constexpr int64_t kLatencyBounds[] = {
    10'000,        50'000,        100'000,        300'000,        600'000,
    1'000'000,     2'000'000,     5'000'000,      10'000'000,     20'000'000,
    50'000'000,    100'000'000,   200'000'000,    500'000'000,    1'000'000'000,
    2'000'000'000, 5'000'000'000, 10'000'000'000, 20'000'000'000, 50'000'000'000};
// Nanoseconds, from 0.1 s to half an hour: loads of models.
inline constexpr int64_t kLoadBounds[] = {100'000'000,     300'000'000,     1'000'000'000,
                                          3'000'000'000,   10'000'000'000,  30'000'000'000,
                                          100'000'000'000, 300'000'000'000, 1'800'000'000'000};
// Bytes of a call's messages, from 1 KiB to 4 GiB.
inline constexpr int64_t kSizeBounds[] = {1 << 10, 1 << 12, 1 << 14,          1 << 16,
                                          1 << 18, 1 << 20, 1 << 22,          1 << 24,
                                          1 << 26, 1 << 28, int64_t{1} << 30, int64_t{1} << 32};
// Tokens or requests of a batch.
inline constexpr int64_t kCountBounds[] = {1,   2,   4,   8,    16,   32,   64,
                                           128, 256, 512, 1024, 2048, 4096, 8192};

}  // namespace awqd
