// LoopHolds: the longest that one event has kept a thread of the loop from the next one.
#pragma once

#include <array>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace awqd::transport {

// Thread-safe. It measures with the kernel's coarse clock, which costs a few nanoseconds and turns
// every few milliseconds: an event that ends within the same turn is no hold.
class LoopHolds {
 public:
  struct Longest {
    absl::Duration wall;
    absl::Duration processor;  // of the thread, which other programs do not lengthen
  };

  // The stopwatch of one thread.
  class Stopwatch {
   public:
    explicit Stopwatch(LoopHolds* all) : all_(all) {}
    // Around each event.
    void Start();
    void Stop();

   private:
    LoopHolds* const all_;
    int64_t turn_ = 0, processor_ = 0;  // nanoseconds at the last turn of the clock that was seen
  };

  // In the last minute.
  Longest longest() const;

 private:
  struct Period {
    int64_t number = -1;
    int64_t wall = 0, processor = 0;
  };
  static constexpr int64_t kPeriodNs = 10'000'000'000;
  static constexpr int64_t kPeriods = 7;  // a minute, and the period that has just begun

  void Record(int64_t now, int64_t wall, int64_t processor);

  mutable Mutex mu_;
  std::array<Period, kPeriods> periods_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::transport
