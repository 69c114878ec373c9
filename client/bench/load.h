// Load: when the requests of a load point are due, sending them, and counting the answers.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/payload.h"
#include "client/bench/plan.h"
#include "client/bench/tally.h"
#include "client/credentials.h"
#include "client/security.h"
#include "grpcpp/channel.h"

namespace awqd::bench {

// Between two reports of a load's progress.
inline constexpr std::chrono::milliseconds kProgressInterval(200);

class Arrivals {
 public:
  // `rate` per second, more than 0. Poisson: independent exponential gaps, the same for the same
  // seed. Otherwise equal gaps, the first one short by `phase` (0 to 1) of a gap, so that several
  // streams interleave.
  Arrivals(double rate, bool poisson, uint64_t seed, double phase)
      : gap_ns_(1e9 / rate),
        poisson_(poisson),
        engine_(seed),
        at_ns_(poisson ? 0 : -phase * 1e9 / rate) {}

  // Nanoseconds from the start to the next arrival; never decreases.
  int64_t NextNs() {
    // Uniform above 0, which has no logarithm, to 1.
    const auto uniform = [this] { return (static_cast<double>(engine_() >> 11) + 1) * 0x1p-53; };
    at_ns_ += (poisson_ ? -std::log(uniform()) : 1) * gap_ns_;
    return static_cast<int64_t>(at_ns_);
  }

 private:
  const double gap_ns_;
  const bool poisson_;
  std::mt19937_64 engine_;
  double at_ns_;
};

struct LoadResult {
  Tally tally;
  double seconds = 0;  // that were measured
  // Requests of an open loop that were due in the window and found max_in_flight calls unanswered
  // until its end: they were never sent, and count as neither good nor answered.
  int64_t unsent = 0;
  bool interrupted = false;  // the sink said so: the window ends with the last answer
  bool server_gone = false;  // the window ends with the last answer with OK
};

// How far a load point is: `share` from 0 to 1, and what was counted so far.
struct LoadProgress {
  double share = 0;
  bool warming_up = false;
  double seconds = 0;  // since the window began
  int64_t answers = 0;
  int64_t errors = 0;
  int64_t p99_ns = 0;
};
// Whether to go on.
using ProgressSink = std::function<bool(const LoadProgress&)>;

// The channels that the calls of a load use, and the credentials that they show.
struct Connections {
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  client::Credentials credentials;
};

// Runs `point` to its end and returns when no call is in flight. The calls are asynchronous and are
// started by gRPC's threads (closed loop) or by threads of ours that sleep until a request is due
// (open loop). Ends early when the server goes away. `progress` is called from this thread, a few
// times a second.
LoadResult RunLoad(const Plan& plan, const LoadPoint& point, const Payloads& payloads,
                   const Connections& connections, const ProgressSink& progress);

// The same of a plan with a ring: a thread for each caller. `point` is a closed loop. Fails when
// the ring cannot be opened, or a request cannot be prepared.
absl::StatusOr<LoadResult> RunRingLoad(const Plan& plan, const LoadPoint& point,
                                       const Payloads& payloads, const client::Security& security,
                                       const ProgressSink& progress);

}  // namespace awqd::bench
