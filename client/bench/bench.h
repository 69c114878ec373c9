// A bench from its plan to its results: asks the server for shapes, connects, tries every request
// once, then runs one load point after the other.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/awqd_client.h"
#include "client/bench/health_probe.h"
#include "client/bench/load.h"
#include "client/bench/plan.h"

namespace awqd::bench {

struct PointResult {
  LoadPoint point;
  LoadResult load;
  bool health_probed = false;
  HealthFacts health;
};

struct BenchEvents {
  // Both may be null and are called from the thread of RunBench.
  std::function<void(const LoadPoint&, const LoadProgress&)> progress;
  std::function<void(const PointResult&)> point_done;
};

// Fills k and n of the plan's weights from the server. The server's status, or NOT_FOUND for a
// weight that its model does not have.
absl::Status FindShapes(client::Client& client, const client::CallOptions& options, Plan& plan);

// `plan` has its shapes. Fails with the server's status when a request fails by itself, before any
// load, and with UNAVAILABLE when no connection comes about.
absl::StatusOr<std::vector<PointResult>> RunBench(const std::string& address, const Plan& plan,
                                                  const BenchEvents& events);

}  // namespace awqd::bench
