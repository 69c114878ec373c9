// One reactor per stream: an alarm for each report.
#include "server/services/orca/service.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"
#include "xds/service/orca/v3/orca.pb.h"

namespace awqd::services::orca {

using ::xds::service::orca::v3::OrcaLoadReportRequest;

namespace {

// Where gRPC's clients look for the report of a call.
constexpr char kTrailer[] = "endpoint-load-metrics-bin";

absl::Status Cancelled() { return absl::CancelledError("the client cancelled the call"); }

absl::StatusOr<absl::Duration> ParseInterval(grpc::ByteBuffer* message) {
  OrcaLoadReportRequest request;
  AWQD_RETURN_IF_ERROR(wire::Parse(message, &request));
  const auto& interval = request.report_interval();
  if (interval.seconds() < 0 || interval.nanos() < 0 || interval.nanos() >= 1'000'000'000) {
    return wire::FieldError("report_interval",
                            absl::StrCat(interval.seconds(), " s and ", interval.nanos(), " ns"),
                            "0 s or more and 0 to 999999999 ns");
  }
  return std::clamp(absl::Seconds(interval.seconds()) + absl::Nanoseconds(interval.nanos()),
                    Service::kShortest, Service::kLongest);
}

}  // namespace

// Counts as open for as long as it exists.
class Service::Stream final : public transport::Reactor,
                              public std::enable_shared_from_this<Stream> {
 public:
  Stream(Service* service, transport::WriteCall* call)
      : service_(service), call_(call), others_(service->open_.fetch_add(1)) {}
  ~Stream() { service_->open_.fetch_sub(1); }

  // The streams that were open before it.
  int others() const { return others_; }

  // `lease`: of the call, to be made as large as each report.
  void Start(absl::Duration interval, transport::ByteLease lease) {
    interval_ = interval;
    call_->SetReactor(this);
    {
      MutexLock lock(&mu_);
      lease_ = std::move(lease);
      self_ = shared_from_this();
      call_->StartAlarm(kShortest);
    }
    draining_ =
        std::make_unique<transport::Drain::Listener>(service_->gate_, [weak = weak_from_this()] {
          if (const auto stream = weak.lock()) stream->End(transport::Drain::UnavailableStatus());
        });
  }

  void OnAlarm() override {
    grpc::ByteBuffer report;
    absl::Status status = CatchExceptions([&] {
      report = wire::Encode(service_->statistics_->Latest()->report);
      return absl::OkStatus();
    });
    MutexLock lock(&mu_);
    if (finished_) return;
    if (status.ok() && !writing_) {
      status = lease_.Resize(static_cast<int64_t>(report.Length()), "report");
    }
    if (!status.ok()) return EndLocked(wire::ToGrpc(status));
    if (!writing_) {
      writing_ = true;
      call_->StartWrite(report);
    }
    call_->StartAlarm(interval_);
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(&mu_);
    writing_ = false;
    if (!ok) return EndLocked(wire::ToGrpc(Cancelled()));
    if (ending_) Finish();
  }

  void OnCancel() override { End(wire::ToGrpc(Cancelled())); }

  void OnDone() override { const std::shared_ptr<Stream> last = std::move(self_); }

 private:
  void End(const grpc::Status& status) {
    MutexLock lock(&mu_);
    EndLocked(status);
  }

  // A call cannot be finished while a write is in progress. The first reason to end counts.
  void EndLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!ending_) status_ = status;
    ending_ = true;
    if (!writing_) Finish();
  }

  void Finish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (finished_) return;
    finished_ = true;
    call_->HurryAlarm();
    call_->FinishOnceRead(status_);
  }

  Service* const service_;
  transport::WriteCall* const call_;
  const int others_;
  absl::Duration interval_;
  std::shared_ptr<Stream> self_;  // gRPC's share
  Mutex mu_;
  transport::ByteLease lease_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mu_);  // once it is ending
  std::unique_ptr<transport::Drain::Listener> draining_;
};

Service::Service(transport::Admission* admission, transport::ByteBudget* in_flight,
                 UtilizationStatistics* statistics)
    : gate_(admission->drain()), in_flight_(in_flight), statistics_(statistics) {
  admission->SetTrailingMetadata(kTrailer, [statistics] { return statistics->Latest()->bytes; });
}

void Service::ServeOn(transport::CallLoop* loop) {
  constexpr int kSlots = 4;
  loop->Serve<transport::WriteCall>("xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
                                    security::Need::kRead, kSlots,
                                    [this](transport::WriteCall* call) { Start(call); });
}

void Service::Start(transport::WriteCall* call) {
  absl::Duration interval;
  transport::ByteLease lease;
  const absl::Status status = CatchExceptions([&]() -> absl::Status {
    const auto asked = static_cast<int64_t>(call->request()->Length());
    AWQD_ASSIGN_OR_RETURN(lease, in_flight_->AcquireBytes(call->charge(), asked, "request"));
    AWQD_ASSIGN_OR_RETURN(interval, ParseInterval(call->request()));
    return absl::OkStatus();
  });
  if (!status.ok()) return call->Finish(wire::ToGrpc(status));
  const auto stream = std::make_shared<Stream>(this, call);
  if (stream->others() < kMaxOpen) return stream->Start(interval, std::move(lease));
  call->Finish(wire::ToGrpc(absl::ResourceExhaustedError(
      absl::StrCat("reports: got one more stream, expected at most ", kMaxOpen, " at once"))));
}

}  // namespace awqd::services::orca
