// Eventually: waits until something is so.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace awqd {

// Returns true once `condition()` is true; false if it is not within `limit`.
inline bool Eventually(absl::FunctionRef<bool()> condition,
                       absl::Duration limit = absl::Seconds(30)) {
  for (const absl::Time until = absl::Now() + limit; absl::Now() < until;) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return condition();
}

}  // namespace awqd
