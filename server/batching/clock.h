// Clock: the only source of time for the batching room, so that tests can hold it still.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace awqd::batching {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
  static const Clock& Real();
};

class RealClock final : public Clock {
 public:
  absl::Time Now() const override { return absl::Now(); }
};

inline const Clock& Clock::Real() {
  static const RealClock* const clock = new RealClock;
  return *clock;
}

}  // namespace awqd::batching
