// Sums up the requests of a call, logs them, and derives the steps of a call from timestamps.
#include "server/obs/call_record.h"

#include <algorithm>
#include <atomic>

namespace awqd::obs {
namespace {

constexpr size_t kMaxNameBytes = 256;

std::atomic<bool> g_wants_requests{false};

}  // namespace

bool LogsRequests() {
  return Logs(LogLevel::kDebug) || g_wants_requests.load(std::memory_order_relaxed);
}

void WantRequests() { g_wants_requests = true; }

void LogRequest(const RequestLog& request, const absl::Status& status) {
  if (!Logs(LogLevel::kDebug)) return;  // avoids the escaping
  LogEvent(LogLevel::kDebug, "request",
           {{"method", request.method},
            {"request_id", LogText(request.request_id)},
            {"model", LogText(request.model)},
            {"weight", LogText(request.weight)},
            {"tokens", request.tokens},
            {"queue_us", request.queue_us},
            {"compute_us", request.compute_us},
            {"total_us", request.total_us},
            {"bytes_in", request.bytes_in},
            {"bytes_out", request.bytes_out},
            {"status", absl::StatusCodeToString(status.code())},
            {"error", LogText(status.ok() ? "" : status.message())}});
}

void CallAnnotations::AddRequest(const RequestLog& request) {
  MutexLock lock(&mu_);
  if (sum_.requests++ == 0) {
    sum_.request_id = request.request_id.substr(0, kMaxNameBytes);
    sum_.model = request.model.substr(0, kMaxNameBytes);
    sum_.weight = request.weight.substr(0, kMaxNameBytes);
    sum_.kernel = request.kernel;
    sum_.batch = request.batch;
    sum_.timestamps = request.timestamps;
  }
  sum_.tokens += request.tokens;
  sum_.queue_us += request.queue_us;
  sum_.compute_us += request.compute_us;
}

std::vector<CallStep> ListSteps(const CallRecord& record) {
  std::vector<CallStep> out;
  const RequestTimestamps& at = record.sum.timestamps;
  if (record.sum.requests == 1 && at.begun > absl::InfinitePast()) {
    const bool submitted = at.submitted > absl::InfinitePast();
    out.push_back({"stage", at.begun, submitted ? at.submitted : at.settled});
    if (submitted) {
      // A request that failed or was withdrawn before it ran has no compute step.
      const absl::Time computing =
          std::min(at.settled, at.submitted + absl::Microseconds(record.sum.queue_us));
      const absl::Time computed =
          std::min(at.settled, computing + absl::Microseconds(record.sum.compute_us));
      const bool ran = record.sum.compute_us > 0;
      out.push_back({"queue", at.submitted, ran ? computing : at.settled});
      if (ran) {
        out.push_back({"compute", computing, computed});
        out.push_back({"answer", computed, at.settled});
      }
    }
  }
  out.push_back({"send", record.answered, record.ended});
  return out;
}

}  // namespace awqd::obs
