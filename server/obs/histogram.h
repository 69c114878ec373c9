// Histogram: how often values fell between fixed bounds; cheap enough for every request.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"

namespace awqd::obs {

// What a histogram held at one moment. Values are of the unit that the histogram was fed with.
struct HistogramData {
  absl::Span<const int64_t> bounds;  // inclusive upper bounds, rising
  std::vector<int64_t> counts;       // one for each bound, and one for what lies above the last
  int64_t sum = 0;

  int64_t total() const {
    int64_t all = 0;
    for (const int64_t count : counts) all += count;
    return all;
  }
  // Of the same bounds, or empty.
  void Add(const HistogramData& other) {
    if (counts.empty()) {
      *this = other;
      return;
    }
    for (size_t i = 0; i < other.counts.size(); ++i) counts[i] += other.counts[i];
    sum += other.sum;
  }
};

// Thread-safe. An Observe is a search among the bounds and two relaxed additions.
class Histogram {
 public:
  // `bounds` rise, and live as long as this and its data: constants below.
  explicit Histogram(absl::Span<const int64_t> bounds)
      : bounds_(bounds), counts_(new std::atomic<int64_t>[bounds.size() + 1] {}) {}

  void Observe(int64_t value) {
    size_t low = 0;
    for (size_t high = bounds_.size(); low < high;) {
      const size_t middle = (low + high) / 2;
      if (bounds_[middle] < value) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    counts_[low].fetch_add(1, std::memory_order_relaxed);
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

// Nanoseconds, from 10 us to 50 s: requests, and what they consist of.
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

}  // namespace awqd::obs
