// RpcServer: the gRPC server with every service of awqd on it, and its start and stop.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/model/model_store.h"
#include "server/services/options.h"

namespace awqd::services {

class RpcServer {
 public:
  // Listens; health is NOT_SERVING until SetServing(true). `engine` and `models` outlive the
  // server. INVALID_ARGUMENT or UNAVAILABLE when an address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const Options& options,
                                                          engine::Engine* engine,
                                                          model::ModelStore* models);
  virtual ~RpcServer() = default;

  // The port that is really bound, also for port 0, of the first TCP address; 0 when there is none.
  virtual int port() const = 0;
  // "127.0.0.1:43211", "unix:/run/awqd.sock": in the order of the options.
  virtual const std::vector<std::string>& addresses() const = 0;
  const std::string& address() const { return addresses().front(); }

  // Every service's health.
  virtual void SetServing(bool serving) = 0;
  // While true, unknown models are UNAVAILABLE instead of NOT_FOUND.
  virtual void SetStarting(bool starting) = 0;

  // Ends watches, refuses new calls, waits for those in flight until `grace` has passed, cancels
  // the rest, and returns when none is left. Loads that were accepted run to their end.
  virtual void Shutdown(absl::Duration grace) = 0;

  // LoadModel and UnloadModel calls that run or wait.
  virtual int64_t pending_loads() const = 0;

  // What Options::in_flight_bytes bounds.
  virtual int64_t in_flight_bytes() const = 0;

  // What SharedMemoryOptions::max_open bounds.
  virtual int64_t open_shared_ranges() const = 0;
};

}  // namespace awqd::services
