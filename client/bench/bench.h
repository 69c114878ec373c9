// A bench from its plan to its results: connects, tries every request once, then runs one load
// point after the other. Reports as JSON for programs and as an SVG plot.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/load.h"
#include "client/bench/plan.h"
#include "client/security.h"

namespace awqd::bench {

// The answers of grpc.health.v1 beside a load.
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

// Called from the thread of RunBench, a few times a second; whether to go on.
using BenchProgress = std::function<bool(const LoadPoint&, const LoadProgress&)>;

// `plan` has its shapes. Adds the result of each load point to `results`. Fails with the server's
// status when a request fails by itself, before any load, with UNAVAILABLE when no connection comes
// about or the server goes away, and as Credentials::Read. Where `progress` ends it, or the server
// goes away, the last result is of the point that was running.
absl::Status RunBench(const Target& target, const Plan& plan, const BenchProgress& progress,
                      std::vector<PointResult>* results);

// Figures of one point that are reported everywhere: rates a second over the window.
struct Rates {
  double requests = 0, good = 0, tokens = 0, bytes = 0;
};
Rates RatesOf(const LoadResult& load);

// Share of the quantile in its name: p50 p90 p99 p99.9.
struct NamedQuantile {
  const char* name;
  double share;
};
inline constexpr NamedQuantile kQuantiles[] = {
    {"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p99_9", 0.999}};

// {"address", "plan": {...}, "points": [{...}]}: times in microseconds, rates a second.
// client/README.md names every field.
std::string ToJson(const std::string& address, const Plan& plan,
                   const std::vector<PointResult>& results);

// Latency (p50, p99, p99.9; logarithmic) over throughput, a mark for each point. One document
// without scripts or references.
std::string ToSvg(const std::string& title, const std::vector<PointResult>& results);

}  // namespace awqd::bench
