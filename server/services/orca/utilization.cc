// Reports from two snapshots, and the snapshots of a running server.
#include "server/services/orca/utilization.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"

namespace awqd::services::orca {
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
    for (const obs::HistogramData& durations : method.durations_ns) out.calls += durations.total();
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

double ComputeMemoryRatio(const obs::Snapshot& snapshot) {
  int64_t bytes = 0, free = 0;
  for (const obs::DeviceStats& device : snapshot.devices) {
    bytes += device.memory_bytes;
    free += device.free_bytes;
  }
  return ComputeRatio(static_cast<double>(bytes - free), static_cast<double>(bytes));
}

int64_t CountWorkingDevices(const obs::Snapshot& snapshot) {
  return std::count_if(snapshot.devices.begin(), snapshot.devices.end(),
                       [](const obs::DeviceStats& device) { return device.healthy; });
}

}  // namespace

Report ComputeReport(const obs::Snapshot& before, const obs::Snapshot& now, absl::Duration elapsed,
                     int cores) {
  const Sums from = AddUp(before), to = AddUp(now);
  const double seconds = absl::ToDoubleSeconds(elapsed);
  const auto rate = [&](int64_t Sums::*sum) {
    return seconds > 0 ? static_cast<double>(to.*sum - from.*sum) / seconds : 0;
  };
  int64_t queued = 0, longest = 0;
  for (const obs::DeviceStats& device : now.devices) {
    queued += device.queued_requests;
    longest = std::max(longest, device.queued_requests);
  }
  Report out;
  out.set_cpu_utilization(ComputeRatio(absl::ToDoubleSeconds(now.process.cpu - before.process.cpu),
                                       seconds * static_cast<double>(cores)));
  out.set_mem_utilization(ComputeMemoryRatio(now));
  auto& utilization = *out.mutable_utilization();
  utilization["devices"] =
      ComputeRatio(rate(&Sums::compute_ns) * 1e-9, static_cast<double>(CountWorkingDevices(now)));
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
  auto reading = std::make_shared<Reading>();
  reading->report = ComputeReport(snapshot_, snapshot_, absl::ZeroDuration(), cores_);
  reading->bytes = reading->report.SerializeAsString();
  reading_ = std::move(reading);
}

std::shared_ptr<const UtilizationStatistics::Reading> UtilizationStatistics::Latest() {
  {
    MutexLock lock(&mu_);
    const auto age = std::chrono::steady_clock::now() - taken_;
    if (collecting_ || absl::FromChrono(age) < kWindow) return reading_;
    collecting_ = true;
  }
  return Replace();
}

std::shared_ptr<const UtilizationStatistics::Reading> UtilizationStatistics::Replace() {
  const absl::Cleanup others_may = [this] {
    MutexLock lock(&mu_);
    collecting_ = false;
  };
  obs::Snapshot snapshot = collect_();
  const SteadyTime now = std::chrono::steady_clock::now();
  SteadyTime before;
  {
    MutexLock lock(&mu_);
    before = taken_;
  }
  auto reading = std::make_shared<Reading>();
  reading->report = ComputeReport(snapshot_, snapshot, absl::FromChrono(now - before), cores_);
  reading->bytes = reading->report.SerializeAsString();
  snapshot_ = std::move(snapshot);
  MutexLock lock(&mu_);
  taken_ = now;
  reading_ = std::move(reading);
  return reading_;
}

}  // namespace awqd::services::orca
