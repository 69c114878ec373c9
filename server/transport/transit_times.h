// TransitTimes: how long requests take to come and answers to leave, followed while the server
// runs. Admission by time counts it into what a call is expected to take.
//
// It does not see what waits in a socket before gRPC reads it.
//
// Attacker: a client that sends or reads slowly on purpose. Its calls take long, and others would
// be refused for that. So a time falls at once and rises slowly: it rises where all calls take
// long. Shown by transit_times_test.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "absl/time/time.h"

namespace awqd::transport {

// Thread-safe, without a lock: a call that is lost in a race changes little.
class TransitStage {
 public:
  using Clock = std::chrono::steady_clock;

  void Enter() { calls_.fetch_add(1, std::memory_order_relaxed); }
  // A call that entered at `since` leaves. Not `whole`: it would have taken longer.
  void Leave(Clock::time_point since, Clock::time_point now, bool whole);
  // How long a call takes that enters now: as long as the latest ones took, and longer in
  // proportion when more calls are in the stage than were then, because a backlog shows in their
  // number first.
  // Zero when none has left within the last second: then the server tries.
  absl::Duration Expect(Clock::time_point now) const;

 private:
  // Whether a call has left within the last second.
  bool Known(Clock::time_point now) const;

  std::atomic<int64_t> calls_{0};  // in the stage
  // Averages over calls that left: their times in nanoseconds, and how many were in the stage.
  std::atomic<float> usual_ns_{0}, usual_calls_{1};
  std::atomic<int64_t> left_at_{0};  // the last one, in nanoseconds of the clock; 0: none
};

struct TransitTimes {
  TransitStage receiving;  // from a call's headers until its message is here
  TransitStage sending;    // from an answer until gRPC has sent it

  absl::Duration Expect(TransitStage::Clock::time_point now) const {
    return receiving.Expect(now) + sending.Expect(now);
  }
};

}  // namespace awqd::transport
