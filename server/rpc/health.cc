// Check, and one reactor per Watch.
#include "server/rpc/health.h"

#include <deque>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/obs/logging.h"
#include "server/rpc/status_grpc.h"

namespace awqd {

using ::grpc::health::v1::HealthCheckRequest;
using ::grpc::health::v1::HealthCheckResponse;

// Lock order: HealthService::mu_, then HealthWatch::mu_.
class HealthWatch final : public grpc::ServerWriteReactor<HealthCheckResponse>,
                          public std::enable_shared_from_this<HealthWatch> {
 public:
  using Status = HealthService::Status;

  HealthWatch(HealthService* service, std::string name)
      : service_(service), name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  // Sends a status unless it is the last one that was queued. A watcher that does not read keeps
  // only the newest few.
  void Send(Status status) {
    MutexLock lock(&mu_);
    if (ended_ || status == last_) return;
    last_ = status;
    if (pending_.size() >= kMaxPending) pending_.pop_front();
    pending_.push_back(status);
    Advance();
  }

  // Ends the stream once what is queued was sent.
  void End() {
    MutexLock lock(&mu_);
    ended_ = true;
    Advance();
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(&mu_);
    writing_ = false;
    if (!ok) {
      ended_ = true;
      pending_.clear();
    }
    Advance();
  }

  void OnCancel() override {
    MutexLock lock(&mu_);
    ended_ = true;
    pending_.clear();
    Advance();
  }

  void OnDone() override { service_->Forget(shared_from_this()); }

 private:
  static constexpr size_t kMaxPending = 16;

  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (writing_ || finished_) return;
    if (!pending_.empty()) {
      response_.set_status(pending_.front());
      pending_.pop_front();
      writing_ = true;
      StartWrite(&response_);
    } else if (ended_) {
      finished_ = true;
      Finish(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is shutting down"));
    }
  }

  HealthService* const service_;
  const std::string name_;
  Mutex mu_;
  std::deque<Status> pending_ ABSL_GUARDED_BY(mu_);
  Status last_ ABSL_GUARDED_BY(mu_) = HealthCheckResponse::UNKNOWN;
  HealthCheckResponse response_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

HealthService::HealthService(std::initializer_list<absl::string_view> services) {
  for (absl::string_view service : services) {
    services_[std::string(service)] = HealthCheckResponse::NOT_SERVING;
  }
}

HealthService::~HealthService() = default;

void HealthService::SetServing(bool serving) {
  MutexLock lock(&mu_);
  if (stopped_) return;
  for (auto& [name, status] : services_) {
    status = serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
  }
  for (const auto& watch : watches_) watch->Send(StatusOf(watch->name()));
}

void HealthService::Stop() {
  SetServing(false);
  MutexLock lock(&mu_);
  stopped_ = true;
  for (const auto& watch : watches_) watch->End();
}

HealthService::Status HealthService::StatusOf(const std::string& service) const {
  const auto it = services_.find(service);
  return it == services_.end() ? HealthCheckResponse::SERVICE_UNKNOWN : it->second;
}

void HealthService::Forget(const std::shared_ptr<HealthWatch>& watch) {
  MutexLock lock(&mu_);
  watches_.erase(watch);
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context,
                                               const HealthCheckRequest* request,
                                               HealthCheckResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  Status status;
  {
    MutexLock lock(&mu_);
    status = StatusOf(request->service());
  }
  if (status == HealthCheckResponse::SERVICE_UNKNOWN) {
    reactor->Finish(ToGrpc(absl::NotFoundError(
        absl::StrCat("service: got \"", LogText(request->service()),
                     "\", expected \"\" or the full name of a service of this server"))));
    return reactor;
  }
  response->set_status(status);
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(
    grpc::CallbackServerContext*, const HealthCheckRequest* request) {
  const auto watch = std::make_shared<HealthWatch>(this, request->service());
  MutexLock lock(&mu_);
  watches_.insert(watch);
  watch->Send(StatusOf(watch->name()));
  if (stopped_) watch->End();
  return watch.get();
}

}  // namespace awqd
