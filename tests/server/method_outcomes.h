// The calls of one method that have ended, by status, for tests of what admission counts.
#pragma once

#include <array>
#include <cstdint>
#include <numeric>

#include "server/obs/snapshot.h"

namespace awqd {

using Outcomes = std::array<int64_t, obs::MethodStats::kCodes>;  // OK first

inline Outcomes OutcomesOf(const obs::MethodStats& calls) {
  Outcomes out = {};
  for (size_t i = 0; i < out.size(); ++i) out[i] = calls.durations_ns[i].total();
  return out;
}

inline int64_t EndedCalls(const obs::MethodStats& calls) {
  const Outcomes outcomes = OutcomesOf(calls);
  return std::accumulate(outcomes.begin(), outcomes.end(), int64_t{0});
}

}  // namespace awqd
