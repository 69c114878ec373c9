// MetricsServer: /metrics, /livez, /readyz and the page at /, with the history that it plots.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/obs/gpu_statistics.h"
#include "server/obs/snapshot.h"

namespace awqd::obs {

// `plans`: also the kernels of each model. Called on several threads, while the server exists.
using Snapshots = std::function<Snapshot(bool plans)>;

// Whether somebody who shows these values of "Authorization" may read metrics: OK, UNAUTHENTICATED,
// or PERMISSION_DENIED. A password of the scheme Basic comes as the token of the scheme Bearer.
// Called on several threads.
using MetricsGuard = std::function<absl::Status(const std::vector<std::string>& authorizations)>;

class MetricsServer {
 public:
  // `gpus`: those that /metrics tells of. `guard`: null for none. /livez and /readyz are open to
  // everybody. Listens, and takes a snapshot every History::kInterval on a thread of its own.
  // Errors as HttpServer::Start.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address,
                                                              Snapshots snapshots,
                                                              MetricsGuard guard = nullptr,
                                                              GpuMeterOptions gpus = {});
  virtual ~MetricsServer() = default;
  virtual int port() const = 0;
};

}  // namespace awqd::obs
