// Exposition: a snapshot as Prometheus's text and as the JSON of the page.
#pragma once

#include <string>
#include <vector>

#include "server/obs/snapshot.h"

namespace awqd::obs {

// The text that Prometheus scrapes. README.md lists names and labels. Labels are methods of the
// server's table, status codes, devices, kernels, and models that are served or being loaded, so
// that clients cannot add series.
std::string PrometheusText(const Snapshot& snapshot);

// One JSON object: version, ready, uptime, limits, models, devices, methods, and the history, which
// is `points`.
std::string StatusJson(const Snapshot& snapshot, const std::vector<TimeSeriesPoint>& points);

}  // namespace awqd::obs
