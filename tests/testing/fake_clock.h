// A clock that stands still until the test moves it.
#pragma once

#include <atomic>

#include "absl/time/time.h"

namespace awqd::testing {

class FakeClock {
 public:
  absl::Time Now() const { return absl::FromUnixMicros(now_us_.load()); }
  void Advance(absl::Duration by) { now_us_ += absl::ToInt64Microseconds(by); }

 private:
  std::atomic<int64_t> now_us_{1'000'000'000};
};

}  // namespace awqd::testing
