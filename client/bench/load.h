// Load: sends the requests of one load point and counts the answers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/payload.h"
#include "client/bench/plan.h"
#include "client/bench/tally.h"
#include "client/credentials.h"
#include "grpcpp/channel.h"

namespace awqd::bench {

struct LoadResult {
  Tally tally;
  double seconds = 0;  // that were measured
  // Requests of an open loop that were due in the window and found max_in_flight calls unanswered
  // until its end: they were never sent, and count as neither good nor answered.
  int64_t unsent = 0;
  bool interrupted = false;  // the sink said so: the window ends with the last answer
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

// What the calls of a load go over, and show.
struct Connections {
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  client::Credentials credentials;
};

// Runs `point` to its end and returns when no call is in flight. The calls are asynchronous and are
// started by gRPC's threads (closed loop) or by threads of ours that sleep until a request is due
// (open loop). UNAVAILABLE when the server goes away. `progress` is called from this thread, a few
// times a second; it may be null.
absl::StatusOr<LoadResult> RunLoad(const Plan& plan, const LoadPoint& point,
                                   const Payloads& payloads, const Connections& connections,
                                   const ProgressSink& progress);

}  // namespace awqd::bench
