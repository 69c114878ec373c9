// A bench from its plan to its results: connects, tries every request once, then runs one load
// point after the other.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/load.h"
#include "client/bench/plan.h"
#include "client/security.h"

namespace awqd::bench {

// What grpc.health.v1 said beside a load.
struct HealthFacts {
  Histogram latency;   // of every Check that was answered
  int64_t failed = 0;  // not answered with OK within 5 s
  int64_t not_serving = 0;
};

struct PointResult {
  LoadPoint point;
  LoadResult load;
  bool health_probed = false;
  HealthFacts health;
};

// The server, and how to speak to it.
struct Target {
  std::string address;
  client::Security security;
};

// Called from the thread of RunBench, a few times a second; whether to go on. May be null.
using BenchProgress = std::function<bool(const LoadPoint&, const LoadProgress&)>;

// `plan` has its shapes. Fails with the server's status when a request fails by itself, before any
// load, with UNAVAILABLE when no connection comes about, and as Credentials::Read. Where `progress`
// ends it, the last result is of the point that was running.
absl::StatusOr<std::vector<PointResult>> RunBench(const Target& target, const Plan& plan,
                                                  const BenchProgress& progress);

}  // namespace awqd::bench
