// The standard health service, grpc.health.v1, with a status per service and Watch.
//
// Our own instead of gRPC's built-in one, which says SERVING before any weight is loaded, is not
// flipped by a shutdown, cannot be described by reflection and does not pass admission.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "grpc/health/v1/health.pb.h"
#include "kernels/base/mutex.h"
#include "server/services/env.h"
#include "server/transport/call.h"

namespace awqd::services {

class HealthWatch;

// Thread-safe. Outlives the gRPC server.
class HealthService {
 public:
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;

  // Every service starts as NOT_SERVING; "" stands for the whole server.
  explicit HealthService(std::initializer_list<absl::string_view> services);
  ~HealthService();

  // Sets every service and tells every watcher. Ignored once Stop was called.
  void SetServing(bool serving);

  // Says whether a service works: it is SERVING only if it works and SetServing says so. A service
  // that was not known is known from now on. Those of the constructor work.
  void SetWorking(const std::string& service, bool working);

  // NOT_SERVING for good, and ends every Watch, so that none holds the server's shutdown.
  void Stop();

  // Its calls are answered while the server stops, and do not hold its end back.
  void Serve(const Env& env);

 private:
  friend class HealthWatch;

  // Answers at once, then at each change. SERVICE_UNKNOWN for a name that is not registered.
  void OnWatch(transport::WriteCall* call);
  Status CurrentStatus(const std::string& service) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Forget(const std::shared_ptr<HealthWatch>& watch);

  void TellWatches() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  bool serving_ ABSL_GUARDED_BY(mu_) = false;
  std::map<std::string, bool> services_ ABSL_GUARDED_BY(mu_);  // whether each works
  std::set<std::shared_ptr<HealthWatch>> watches_ ABSL_GUARDED_BY(mu_);
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace awqd::services
