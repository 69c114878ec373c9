// The monotonic clock of the load generator.
#pragma once

#include <chrono>
#include <cstdint>

namespace awqd::bench {

// Nanoseconds since an arbitrary start; never steps back.
inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace awqd::bench
