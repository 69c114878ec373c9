// What two snapshots differ in.
#include "server/obs/history.h"

#include <algorithm>

#include "absl/strings/match.h"

namespace awqd::obs {
namespace {

struct Sums {
  int64_t requests = 0, tokens = 0, batches = 0, queue_ns = 0, failed = 0, used_bytes = 0;
  int64_t queued = 0;
};

Sums SumsOf(const Snapshot& snapshot) {
  Sums out;
  for (const DeviceStats& device : snapshot.devices) {
    out.requests += device.batch_requests.sum;
    out.tokens += device.batch_tokens.sum;
    out.batches += device.batch_tokens.total();
    out.queue_ns += device.queue_ns.sum;
    out.queued += device.queued_requests;
    out.used_bytes += device.memory_bytes - device.free_bytes;
  }
  for (const MethodStats& method : snapshot.methods) {
    for (int code = 1; code < MethodStats::kCodes; ++code) {
      out.failed += method.durations_ns[code].total();
    }
  }
  return out;
}

double Share(double value, int64_t of) { return of > 0 ? value / static_cast<double>(of) : 0; }

HistoryPoint Between(const Snapshot& before, const Snapshot& now) {
  const Sums from = SumsOf(before), to = SumsOf(now);
  const double seconds = std::max(1e-3, absl::ToDoubleSeconds(now.time - before.time));
  const HistogramData calls = Since(RequestDurations(before), RequestDurations(now));
  const auto tokens = static_cast<double>(to.tokens - from.tokens);
  HistoryPoint out;
  out.time = now.time;
  out.requests_per_s = static_cast<double>(to.requests - from.requests) / seconds;
  out.tokens_per_s = tokens / seconds;
  out.failed_per_s = static_cast<double>(to.failed - from.failed) / seconds;
  out.p50_ms = Quantile(calls, 0.5) * 1e-6;
  out.p99_ms = Quantile(calls, 0.99) * 1e-6;
  out.batch_tokens = Share(tokens, to.batches - from.batches);
  out.queue_ms =
      Share(static_cast<double>(to.queue_ns - from.queue_ns) * 1e-6, to.requests - from.requests);
  out.queued = static_cast<double>(to.queued);
  out.in_flight_bytes = static_cast<double>(now.in_flight_bytes);
  out.resident_bytes = static_cast<double>(now.process.resident_bytes);
  out.device_bytes = static_cast<double>(to.used_bytes);
  return out;
}

}  // namespace

HistogramData RequestDurations(const Snapshot& snapshot) {
  HistogramData out;
  for (const MethodStats& method : snapshot.methods) {
    // Those of both protocols.
    if (!absl::StrContains(method.method, "Inference/") &&
        !absl::EndsWith(method.method, "/ModelInfer")) {
      continue;
    }
    if (absl::EndsWith(method.method, "Stream")) continue;
    for (const HistogramData& durations : method.durations_ns) out.Add(durations);
  }
  return out;
}

void History::Add(const Snapshot& snapshot) {
  MutexLock lock(&mu_);
  if (last_.has_value()) points_.push_back(Between(*last_, snapshot));
  last_ = snapshot;
  while (!points_.empty() && points_.front().time < snapshot.time - kLength) points_.pop_front();
}

std::vector<HistoryPoint> History::points() const {
  MutexLock lock(&mu_);
  return {points_.begin(), points_.end()};
}

}  // namespace awqd::obs
