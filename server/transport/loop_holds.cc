// A coarse clock for every event, and a precise one where that has turned.
#include "server/transport/loop_holds.h"

#include <time.h>

#include <algorithm>

namespace awqd::transport {
namespace {

int64_t Read(clockid_t clock) {
  timespec time = {};
  clock_gettime(clock, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

void LoopHolds::Stopwatch::Start() {
  const int64_t now = Read(CLOCK_MONOTONIC_COARSE);
  if (now == turn_) return;
  turn_ = now;
  processor_ = Read(CLOCK_THREAD_CPUTIME_ID);
}

void LoopHolds::Stopwatch::Stop() {
  const int64_t now = Read(CLOCK_MONOTONIC_COARSE);
  if (now == turn_) return;
  const int64_t processor = Read(CLOCK_THREAD_CPUTIME_ID);
  all_->Record(now, now - turn_, processor - processor_);
  turn_ = now;
  processor_ = processor;
}

void LoopHolds::Record(int64_t now, int64_t wall, int64_t processor) {
  const int64_t number = now / kPeriodNs;
  MutexLock lock(&mu_);
  Period& period = periods_[static_cast<size_t>(number % kPeriods)];
  if (period.number != number) period = {.number = number};
  period.wall = std::max(period.wall, wall);
  period.processor = std::max(period.processor, processor);
}

LoopHolds::Longest LoopHolds::longest() const {
  const int64_t oldest = Read(CLOCK_MONOTONIC_COARSE) / kPeriodNs - kPeriods;
  int64_t wall = 0, processor = 0;
  MutexLock lock(&mu_);
  for (const Period& period : periods_) {
    if (period.number <= oldest) continue;
    wall = std::max(wall, period.wall);
    processor = std::max(processor, period.processor);
  }
  return {.wall = absl::Nanoseconds(wall), .processor = absl::Nanoseconds(processor)};
}

}  // namespace awqd::transport
