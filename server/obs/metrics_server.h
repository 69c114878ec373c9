// MetricsServer: serves /metrics, /livez, /readyz and the page at / with its time series.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/pause.h"
#include "server/obs/gpu_statistics.h"
#include "server/obs/http_server.h"
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
  // Answers on `sockets`, as HttpServer does and with its errors, and takes a snapshot every
  // TimeSeries::kInterval on a thread of its own. `guard`: null lets everybody read; /livez and
  // /readyz are open to everybody in any case. `gpus`: the GPUs in /metrics.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(std::vector<UniqueFd> sockets,
                                                              SnapshotSource snapshots,
                                                              MetricsGuard guard = nullptr,
                                                              GpuStatisticsOptions gpus = {});
  ~MetricsServer();
  int port() const { return http_->port(); }

 private:
  MetricsServer(SnapshotSource snapshots, MetricsGuard guard, GpuStatisticsOptions gpus)
      : snapshots_(std::move(snapshots)), guard_(std::move(guard)), gpus_(std::move(gpus)) {}

  HttpAnswer Answer(const HttpRequest& request);
  HttpAnswer AnswerReadiness() const;
  Snapshot AddGpuStatistics(Snapshot snapshot);

  const SnapshotSource snapshots_;
  const MetricsGuard guard_;
  GpuStatisticsReader gpus_;
  TimeSeries time_series_;
  Pause pause_;
  std::unique_ptr<HttpServer> http_;
  std::thread sampler_;
};

}  // namespace awqd::obs
