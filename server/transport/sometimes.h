// Sometimes: lets one line of a kind through per second, for what a peer can cause as often as it
// likes.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace awqd::transport {

// Thread-safe.
class Sometimes {
 public:
  // True when nothing was let through for a second: `times` is then how often this was called since
  // the last true, this call included.
  bool Now(int64_t* times) {
    waiting_.fetch_add(1, std::memory_order_relaxed);
    const int64_t now = absl::GetCurrentTimeNanos();
    int64_t next = next_.load(std::memory_order_relaxed);
    if (now < next || !next_.compare_exchange_strong(next, now + kNanosPerSecond)) return false;
    *times = waiting_.exchange(0, std::memory_order_relaxed);
    return true;
  }

 private:
  static constexpr int64_t kNanosPerSecond = 1'000'000'000;

  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> waiting_{0};
};

}  // namespace awqd::transport
