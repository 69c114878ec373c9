// What a bench found, as JSON for programs and as an SVG plot.
#pragma once

#include <string>
#include <vector>

#include "client/bench/bench.h"

namespace awqd::bench {

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
