// MetricsServer: serves /metrics, /livez, /readyz and the page at / with its time series.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/obs/gpu_statistics.h"
#include "server/obs/snapshot.h"

namespace awqd::obs {

// Takes a snapshot. `plans`: with the kernels of each model. Called on several threads while the
// server exists.
using SnapshotSource = std::function<Snapshot(bool plans)>;

// Decides whether a client with these values of the header "Authorization" may read metrics.
// Returns OK, UNAUTHENTICATED or PERMISSION_DENIED. The server passes a password of the scheme
// Basic as a token of the scheme Bearer. Called on several threads.
using MetricsGuard = std::function<absl::Status(const std::vector<std::string>& authorizations)>;

// A file of the page, which the build embeds: "index.html", "page.css" or "page.js". Empty for any
// other name.
absl::string_view PageFile(absl::string_view name);

class MetricsServer {
 public:
  // Listens, and takes a snapshot every TimeSeries::kInterval on a thread of its own. `guard`: null
  // lets everybody read; /livez and /readyz are open to everybody in any case. `gpus`: the GPUs in
  // /metrics. Returns the errors of HttpServer::Start.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address,
                                                              SnapshotSource snapshots,
                                                              MetricsGuard guard = nullptr,
                                                              GpuStatisticsOptions gpus = {});
  virtual ~MetricsServer() = default;
  virtual int port() const = 0;
};

}  // namespace awqd::obs
