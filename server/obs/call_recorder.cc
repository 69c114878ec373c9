// Which calls have lines, and what a line says.
#include "server/obs/access_log.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "server/obs/logging.h"

namespace awqd::obs {

namespace {

bool IsProbe(absl::string_view method) {
  return absl::StartsWith(method, "grpc.health.v1.Health/");
}

}  // namespace

AccessLog::Line AccessLog::Wants(absl::string_view method, absl::StatusCode code,
                                 absl::Duration waited, absl::Time now) {
  const bool probe = IsProbe(method);
  Line out = {.slow = waited > absl::ZeroDuration() && waited >= options_.slow};
  const bool answered = code == absl::StatusCode::kOk || code == absl::StatusCode::kCancelled;
  const Kind kind = out.slow ? kSlow : code != absl::StatusCode::kOk ? kFailed : kGood;
  switch (options_.mode) {
    case AccessLogMode::kOff:
      return out;
    case AccessLogMode::kAll:
      out.wanted = true;
      return out;
    case AccessLogMode::kSlow:
      if (!out.slow) return out;
      break;
    case AccessLogMode::kSampled:
      if (probe && answered) return out;
      break;
  }
  const int64_t second = absl::ToUnixSeconds(now);
  MutexLock lock(&mu_);
  Budget& budget = budgets_[kind];
  if (budget.second != second) budget = {.second = second, .skipped = budget.skipped};
  out.wanted = budget.lines < options_.lines_per_s;
  if (!out.wanted) {
    ++budget.skipped;
    return out;
  }
  ++budget.lines;
  out.skipped = std::exchange(budget.skipped, 0);
  return out;
}

namespace {

// The step that took most of the call.
std::string Longest(const CallRecord& record) {
  const std::vector<CallStep> steps = StepsOf(record);
  const auto longest = std::max_element(
      steps.begin(), steps.end(),
      [](const CallStep& a, const CallStep& b) { return a.end - a.begin < b.end - b.begin; });
  return std::string(longest->name);
}

}  // namespace

void AccessLog::Write(const CallRecord& record, const Line& line) const {
  const RequestSum& sum = record.sum;
  std::vector<LogField> fields = {{"method", record.method},
                                  {"code", absl::StatusCodeToString(record.code)},
                                  {"peer", LogText(record.peer)},
                                  {"identity", LogText(record.identity)},
                                  {"request_id", LogText(sum.request_id)},
                                  {"trace", record.trace.trace_id()},
                                  {"model", LogText(sum.model)},
                                  {"weight", LogText(sum.weight)},
                                  {"requests", sum.requests},
                                  {"tokens", sum.tokens},
                                  {"queue_us", sum.queue_us},
                                  {"compute_us", sum.compute_us},
                                  {"total_us", absl::ToInt64Microseconds(record.total())},
                                  {"bytes_in", record.received_bytes},
                                  {"bytes_out", record.sent_bytes}};
  if (line.slow) fields.push_back({"step", Longest(record)});
  if (line.skipped > 0) fields.push_back({"skipped", line.skipped});
  LogEvent(line.slow ? LogLevel::kWarning : LogLevel::kInfo, line.slow ? "slow call" : "call",
           absl::MakeConstSpan(fields));
}

}  // namespace awqd::obs
