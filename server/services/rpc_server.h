// RpcServer: the gRPC server with every service of awqd on it, and its start and stop.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/services/env.h"
#include "server/services/health.h"
#include "server/transport/grpc_server.h"

namespace awqd::services {

class RpcServer {
 public:
  // Listens; health is NOT_SERVING until SetServing(true). `engine` and `models` outlive the
  // server. INVALID_ARGUMENT or UNAVAILABLE when an address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const Options& options,
                                                          engine::Engine* engine,
                                                          repository::ModelStore* models);
  ~RpcServer() { Shutdown(absl::ZeroDuration()); }

  // The port that is really bound, also for port 0, of the first TCP address; 0 when there is none.
  int port() const { return grpc_.port(); }
  // "127.0.0.1:43211", "unix:/run/awqd.sock": in the order of the options.
  const std::vector<std::string>& addresses() const { return grpc_.addresses(); }
  const std::string& address() const { return addresses().front(); }

  // Every service's health.
  void SetServing(bool serving) {
    env_.serving = serving;
    health_.SetServing(serving);
  }
  // Whether they can be SERVING where SetServing says so: false when no model can be served.
  void SetAbleToServe(bool able);
  // Says whether a device works, which is the service "devices/<id>".
  void SetDeviceServing(const std::string& id, bool serving) {
    health_.SetWorking(DeviceService(id), serving);
  }
  // While true, unknown models are UNAVAILABLE instead of NOT_FOUND.
  void SetStarting(bool starting) { env_.starting.store(starting); }

  // Ends watches, refuses new calls, waits for those in flight until `grace` has passed, cancels
  // the rest, and returns when none is left. Loads that were accepted run to their end.
  void Shutdown(absl::Duration grace);

  // Everything that is counted, and whether health is SERVING. Thread-safe, until the destructor.
  obs::Snapshot Snapshot(Plans plans) const;

  // Every call passes it: the counts of calls, and the drain that Shutdown starts.
  transport::Admission* admission() { return grpc_.admission(); }
  // The bytes that Options::in_flight_bytes bounds.
  int64_t in_flight_bytes() const { return env_.in_flight->in_flight(); }
  // The ranges that SharedMemoryOptions::max_open bounds.
  int64_t open_shared_ranges() const { return env_.shared_memory->open_ranges(); }

 private:
  static std::string DeviceService(const std::string& id) { return "devices/" + id; }
  RpcServer(const Options& options, engine::Engine* engine, repository::ModelStore* models);

  Env env_;
  HealthService health_;
  transport::GrpcServer grpc_;
};

}  // namespace awqd::services
