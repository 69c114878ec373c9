// MetricsServer: /metrics, /livez, /readyz and the page at /, with the history that it plots.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/obs/snapshot.h"

namespace awqd::obs {

// `plans`: also the kernels of each model. Called on several threads, while the server exists.
using Snapshots = std::function<Snapshot(bool plans)>;

class MetricsServer {
 public:
  // Listens, and takes a snapshot every History::kInterval on a thread of its own. Errors as
  // HttpServer::Start.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address,
                                                              Snapshots snapshots);
  virtual ~MetricsServer() = default;
  virtual int port() const = 0;
};

}  // namespace awqd::obs
