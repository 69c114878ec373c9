// Check, and one reactor per Watch.
#include "server/services/health.h"

#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/services/unary.h"

namespace awqd::services {

using ::grpc::health::v1::HealthCheckRequest;
using ::grpc::health::v1::HealthCheckResponse;

namespace {

// A watch keeps its name for as long as it is open.
constexpr size_t kMaxServiceBytes = 256;

absl::Status CheckService(const HealthCheckRequest& request) {
  if (request.service().size() <= kMaxServiceBytes) return absl::OkStatus();
  return wire::FieldError("service", absl::StrCat(request.service().size(), " bytes"),
                          absl::StrCat("at most ", kMaxServiceBytes));
}

}  // namespace

// Lock order: HealthService::mu_, then HealthWatch::mu_.
class HealthWatch final : public transport::Reactor,
                          public std::enable_shared_from_this<HealthWatch> {
 public:
  using Status = HealthService::Status;

  HealthWatch(HealthService* service, transport::WriteCall* call, std::string name)
      : service_(service), call_(call), name_(std::move(name)) {}

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
    cancelled_ = true;
    pending_.clear();
    Advance();
  }

  void OnDone() override { service_->Forget(shared_from_this()); }

 private:
  static constexpr size_t kMaxPending = 16;

  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (writing_ || finished_) return;
    if (!pending_.empty()) {
      HealthCheckResponse response;
      response.set_status(pending_.front());
      pending_.pop_front();
      writing_ = true;
      call_->StartWrite(wire::Encode(response));
    } else if (ended_) {
      finished_ = true;
      call_->Finish(wire::ToGrpc(cancelled_
                                     ? absl::CancelledError("the client cancelled the call")
                                     : absl::UnavailableError("the server is shutting down")));
    }
  }

  HealthService* const service_;
  transport::WriteCall* const call_;
  const std::string name_;
  Mutex mu_;
  std::deque<Status> pending_ ABSL_GUARDED_BY(mu_);
  Status last_ ABSL_GUARDED_BY(mu_) = HealthCheckResponse::UNKNOWN;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;  // by the client
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

HealthService::HealthService(std::initializer_list<absl::string_view> services) {
  for (absl::string_view service : services) {
    services_[std::string(service)] = true;
  }
}

HealthService::~HealthService() = default;

void HealthService::SetServing(bool serving) {
  MutexLock lock(&mu_);
  if (stopped_) return;
  serving_ = serving;
  TellWatches();
}

void HealthService::SetWorking(const std::string& service, bool working) {
  MutexLock lock(&mu_);
  if (stopped_) return;
  services_[service] = working;
  TellWatches();
}

void HealthService::TellWatches() {
  for (const auto& watch : watches_) watch->Send(CurrentStatus(watch->name()));
}

void HealthService::Stop() {
  SetServing(false);
  MutexLock lock(&mu_);
  stopped_ = true;
  for (const auto& watch : watches_) watch->End();
}

HealthService::Status HealthService::CurrentStatus(const std::string& service) const {
  const auto it = services_.find(service);
  if (it == services_.end()) return HealthCheckResponse::SERVICE_UNKNOWN;
  return serving_ && it->second ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

void HealthService::Forget(const std::shared_ptr<HealthWatch>& watch) {
  MutexLock lock(&mu_);
  watches_.erase(watch);
}

void HealthService::Serve(const Env& env) {
  constexpr int kSlots = 8;
  ServeUnary<HealthCheckRequest, HealthCheckResponse>(
      env, "grpc.health.v1.Health/Check", {.need = security::Need::kHealth},
      [this](const transport::UnaryCall&, const HealthCheckRequest& request,
             HealthCheckResponse* response) -> absl::Status {
        AWQD_RETURN_IF_ERROR(CheckService(request));
        MutexLock lock(&mu_);
        response->set_status(CurrentStatus(request.service()));
        if (response->status() != HealthCheckResponse::SERVICE_UNKNOWN) return absl::OkStatus();
        return absl::NotFoundError(
            absl::StrCat("service: got \"", obs::LogText(request.service()),
                         "\", expected \"\" or the full name of a service of this server"));
      });
  env.loop->Serve<transport::WriteCall>("grpc.health.v1.Health/Watch", security::Need::kHealth,
                                        kSlots,
                                        [this](transport::WriteCall* call) { OnWatch(call); });
}

void HealthService::OnWatch(transport::WriteCall* call) {
  HealthCheckRequest request;
  const absl::Status status = CatchExceptions([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(wire::Parse(call->request(), &request));
    return CheckService(request);
  });
  if (!status.ok()) return call->Finish(wire::ToGrpc(status));
  const auto watch = std::make_shared<HealthWatch>(this, call, request.service());
  call->SetReactor(watch.get());
  MutexLock lock(&mu_);
  watches_.insert(watch);
  watch->Send(CurrentStatus(watch->name()));
  if (stopped_) watch->End();
}

}  // namespace awqd::services
