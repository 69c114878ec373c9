// Histogram: latencies in buckets that are at most 1/128 of their value wide.
#pragma once

#include <cstdint>
#include <vector>

namespace awqd::bench {

// Values are nanoseconds from 0 to 2^41 (36 minutes); what lies outside counts as the nearer end.
// Below 256 every value has its own bucket; from there each power of two has 128.
// Not thread-safe.
class Histogram {
 public:
  Histogram();

  void Add(int64_t value_ns);
  void Merge(const Histogram& other);

  int64_t count() const { return count_; }
  // 0 when empty. The largest value is exact.
  int64_t max_ns() const { return max_; }
  double mean_ns() const;
  // The least bucket edge that at least `share` (0 to 1) of the values do not pass, never more than
  // max_ns(); 0 when empty.
  int64_t QuantileNs(double share) const;

 private:
  std::vector<int64_t> buckets_;
  int64_t count_ = 0;
  int64_t max_ = 0;
  double sum_ = 0;
};

}  // namespace awqd::bench
