// Reports from two snapshots, the snapshots of a running server, and one reactor per stream with an
// alarm for each report.
#include "server/services/orca.h"

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/process_limits.h"
#include "kernels/base/status.h"
#include "server/services/env.h"
#include "server/services/info_stream.h"
#include "server/transport/admission.h"
#include "server/transport/call_loop.h"
#include "server/transport/limits.h"
#include "server/wire/raw_message.h"
#include "server/wire/status.h"
#include "xds/service/orca/v3/orca.pb.h"

namespace awqd::services::orca {

using ::xds::service::orca::v3::OrcaLoadReportRequest;

namespace {

struct Sums {
  int64_t calls = 0, failed = 0;  // of the inference services
  int64_t requests = 0, tokens = 0, queue_ns = 0, compute_ns = 0;
};

// Whether it is a method of inference, of either protocol.
bool IsInference(absl::string_view method) {
  return absl::StrContains(method, "Inference/") || absl::EndsWith(method, "/ModelInfer") ||
         absl::EndsWith(method, "/ModelStreamInfer");
}

// Failures that a client may not have had of another server.
constexpr std::initializer_list<absl::StatusCode> kServersFault = {
    absl::StatusCode::kUnknown,           absl::StatusCode::kDeadlineExceeded,
    absl::StatusCode::kResourceExhausted, absl::StatusCode::kInternal,
    absl::StatusCode::kUnavailable,       absl::StatusCode::kDataLoss};

Sums AddUp(const obs::Snapshot& snapshot) {
  Sums out;
  for (const obs::MethodStats& method : snapshot.methods) {
    if (!IsInference(method.method)) continue;
    for (const HistogramData& durations : method.durations_ns) out.calls += durations.total();
    for (const absl::StatusCode code : kServersFault) {
      out.failed += method.durations_ns[static_cast<size_t>(code)].total();
    }
  }
  for (const obs::DeviceStats& device : snapshot.devices) {
    out.requests += device.queue_ns.total();
    out.tokens += device.batch_tokens.sum;
    out.queue_ns += device.queue_ns.sum;
    out.compute_ns += device.compute_ns.sum;
  }
  return out;
}

double ComputeRatio(double value, double of) {
  return of > 0 ? std::clamp(value / of, 0.0, 1.0) : 0;
}

// Where gRPC's clients look for the report of a call.
constexpr char kTrailer[] = "endpoint-load-metrics-bin";

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
                    kShortest, kLongest);
}

}  // namespace

Report ComputeReport(const obs::Snapshot& before, const obs::Snapshot& now, absl::Duration elapsed,
                     int cores) {
  const Sums from = AddUp(before), to = AddUp(now);
  const double seconds = absl::ToDoubleSeconds(elapsed);
  const auto rate = [&](int64_t Sums::*sum) {
    return seconds > 0 ? static_cast<double>(to.*sum - from.*sum) / seconds : 0;
  };
  int64_t queued = 0, longest = 0, bytes = 0, free = 0, working = 0;
  for (const obs::DeviceStats& device : now.devices) {
    queued += device.queued_requests;
    longest = std::max(longest, device.queued_requests);
    bytes += device.memory_bytes;
    free += device.free_bytes;
    working += device.healthy ? 1 : 0;
  }
  Report out;
  out.set_cpu_utilization(ComputeRatio(absl::ToDoubleSeconds(now.process.cpu - before.process.cpu),
                                       seconds * static_cast<double>(cores)));
  out.set_mem_utilization(
      ComputeRatio(static_cast<double>(bytes - free), static_cast<double>(bytes)));
  auto& utilization = *out.mutable_utilization();
  utilization["devices"] =
      ComputeRatio(rate(&Sums::compute_ns) * 1e-9, static_cast<double>(working));
  utilization["queue"] =
      ComputeRatio(static_cast<double>(longest), static_cast<double>(now.queue_limit_requests));
  utilization["in_flight_bytes"] = ComputeRatio(static_cast<double>(now.in_flight_bytes),
                                                static_cast<double>(now.in_flight_limit_bytes));
  for (const auto& [name, share] : utilization) {
    out.set_application_utilization(std::max(out.application_utilization(), share));
  }
  out.set_rps_fractional(rate(&Sums::calls));
  out.set_eps(rate(&Sums::failed));
  auto& metrics = *out.mutable_named_metrics();
  const auto requests = static_cast<double>(to.requests - from.requests);
  metrics["queued_requests"] = static_cast<double>(queued);
  metrics["queue_ms"] =
      requests > 0 ? static_cast<double>(to.queue_ns - from.queue_ns) * 1e-6 / requests : 0;
  metrics["tokens_per_s"] = rate(&Sums::tokens);
  return out;
}

UtilizationStatistics::UtilizationStatistics(std::function<obs::Snapshot()> collect, int cores)
    : collect_(std::move(collect)),
      cores_(cores),
      taken_(std::chrono::steady_clock::now()),
      snapshot_(collect_()) {
  reading_ = Read(snapshot_, absl::ZeroDuration());
}

std::shared_ptr<const UtilizationStatistics::Reading> UtilizationStatistics::Read(
    const obs::Snapshot& snapshot, absl::Duration elapsed) const {
  auto reading = std::make_shared<Reading>();
  reading->report = ComputeReport(snapshot_, snapshot, elapsed, cores_);
  reading->bytes = reading->report.SerializeAsString();
  return reading;
}

std::shared_ptr<const UtilizationStatistics::Reading> UtilizationStatistics::Latest() {
  std::chrono::steady_clock::time_point before;
  {
    MutexLock lock(&mu_);
    before = taken_;
    const auto age = std::chrono::steady_clock::now() - before;
    if (collecting_ || absl::FromChrono(age) < kWindow) return reading_;
    collecting_ = true;
  }
  const absl::Cleanup others_may = [this] {
    MutexLock lock(&mu_);
    collecting_ = false;
  };
  obs::Snapshot snapshot = collect_();
  const auto now = std::chrono::steady_clock::now();
  auto reading = Read(snapshot, absl::FromChrono(now - before));
  snapshot_ = std::move(snapshot);
  MutexLock lock(&mu_);
  taken_ = now;
  reading_ = std::move(reading);
  return reading_;
}

// --- The service ---

namespace {

class Stream final : public InfoStream<transport::WriteCall> {
 public:
  Stream(UtilizationStatistics* statistics, absl::Duration interval, transport::WriteCall* call,
         transport::ByteLease lease, std::atomic<int>* open)
      : InfoStream(call, std::move(lease), open), statistics_(statistics), interval_(interval) {}

  void OnAlarm() override {
    grpc::ByteBuffer report;
    absl::Status status = CatchExceptions([&] {
      report = wire::Encode(statistics_->Latest()->report);
      return absl::OkStatus();
    });
    MutexLock lock(&mu_);
    if (finished_) return;
    if (status.ok() && !writing_) {
      status = lease_.Resize(static_cast<int64_t>(report.Length()), "report");
    }
    if (!status.ok()) return EndLocked(wire::ToGrpc(status));
    if (!writing_) Write(report);
    call_->StartAlarm(interval_);
  }

 private:
  void Begin() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { call_->StartAlarm(kShortest); }

  UtilizationStatistics* const statistics_;
  const absl::Duration interval_;
};

}  // namespace

void Serve(const Env& env) {
  constexpr int kSlots = 4;
  // They live as long as the handlers that know them.
  const auto statistics = std::make_shared<UtilizationStatistics>(
      [&env] { return CollectSnapshot(env, Plans::kLeftOut); }, UsableThreads());
  const auto open = std::make_shared<std::atomic<int>>(0);
  env.admission->SetTrailingMetadata(kTrailer,
                                     [statistics] { return statistics->Latest()->bytes; });
  env.loop->Serve<transport::WriteCall>(
      "xds.service.orca.v3.OpenRcaService/StreamCoreMetrics", security::Need::kRead, kSlots,
      [&env, statistics, open](transport::WriteCall* call) {
        absl::Duration interval;
        transport::ByteLease lease;
        const absl::Status status = CatchExceptions([&]() -> absl::Status {
          const auto asked = static_cast<int64_t>(call->request()->Length());
          AWQD_ASSIGN_OR_RETURN(lease,
                                env.in_flight->AcquireBytes(call->charge(), asked, "request"));
          AWQD_ASSIGN_OR_RETURN(interval, ParseInterval(call->request()));
          return absl::OkStatus();
        });
        if (!status.ok()) return call->Finish(wire::ToGrpc(status));
        std::make_shared<Stream>(statistics.get(), interval, call, std::move(lease), open.get())
            ->Start(env.admission->drain(), kMaxOpen, "reports");
      });
}

}  // namespace awqd::services::orca
