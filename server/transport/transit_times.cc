// Averages that fall at once.
#include "server/transport/transit_times.h"

#include <algorithm>

namespace awqd::transport {
namespace {

// The average rises to 1.44 times at most with each call that took longer.
constexpr float kWeight = 1.0F / 16, kMostChange = 8;
// It begins with no more, whatever the first call took.
constexpr float kBeginNs = 1e6;
constexpr float kCallsWeight = 1.0F / 8;
// How much more than before a crowd of calls counts, which may wait for their clients.
constexpr float kMostCrowd = 64;
constexpr int64_t kKnownNs = 1'000'000'000;

int64_t Nanoseconds(TransitStage::Clock::duration time) {
  return std::chrono::nanoseconds(time).count();
}

}  // namespace

void TransitStage::Leave(Clock::time_point since, Clock::time_point now, bool whole) {
  constexpr auto kOrder = std::memory_order_relaxed;
  const auto calls = static_cast<float>(calls_.fetch_sub(1, kOrder));
  const auto took = static_cast<float>(std::max<int64_t>(1, Nanoseconds(now - since)));
  float usual = usual_ns_.load(kOrder);
  if (!Known(now)) {
    usual = std::min(took, kBeginNs);
  } else if (took >= usual) {
    usual += (std::min(took, usual * kMostChange) - usual) * kWeight;
  } else if (whole) {
    usual = took;
  } else {
    return;
  }
  const float usual_calls = usual_calls_.load(kOrder);
  usual_ns_.store(usual, kOrder);
  usual_calls_.store(usual_calls + (calls - usual_calls) * kCallsWeight, kOrder);
  left_at_.store(Nanoseconds(now.time_since_epoch()), kOrder);
}

bool TransitStage::Known(Clock::time_point now) const {
  const int64_t left_at = left_at_.load(std::memory_order_relaxed);
  return left_at != 0 && Nanoseconds(now.time_since_epoch()) - left_at <= kKnownNs;
}

absl::Duration TransitStage::Expect(Clock::time_point now) const {
  constexpr auto kOrder = std::memory_order_relaxed;
  if (!Known(now)) return absl::ZeroDuration();
  const float crowd =
      static_cast<float>(calls_.load(kOrder)) / std::max(1.0F, usual_calls_.load(kOrder));
  return absl::Nanoseconds(usual_ns_.load(kOrder) * std::clamp(crowd, 1.0F, kMostCrowd));
}

}  // namespace awqd::transport
