// Chooses the calls that have a line in the log, and writes a line.
#include "server/obs/call_recorder.h"

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"

namespace awqd::obs {
namespace {

absl::string_view LongestStep(const CallRecord& record) {
  const std::vector<CallStep> steps = ListSteps(record);
  return std::max_element(
             steps.begin(), steps.end(),
             [](const CallStep& a, const CallStep& b) { return a.end - a.begin < b.end - b.begin; })
      ->name;
}

}  // namespace

AccessLog::Line AccessLog::Wants(absl::string_view method, absl::StatusCode code,
                                 absl::Duration waited, absl::Time now) {
  const AccessLogMode mode = options_.mode;
  Line out = {.slow = waited > absl::ZeroDuration() && waited >= options_.slow};
  const bool answered = code == absl::StatusCode::kOk || code == absl::StatusCode::kCancelled;
  const bool probe = answered && absl::StartsWith(method, "grpc.health.v1.Health/");
  out.wanted = mode == AccessLogMode::kAll;
  if (out.wanted || mode == AccessLogMode::kOff || (mode == AccessLogMode::kSlow && !out.slow) ||
      (mode == AccessLogMode::kSampled && probe)) {
    return out;
  }
  const absl::string_view kind = out.slow                        ? "slow"
                                 : code != absl::StatusCode::kOk ? "failed"
                                                                 : "good";
  const LogLimit::Verdict verdict = limit_.CountLine(kind, now);
  out.wanted = verdict.log;
  out.skipped = verdict.left_out;
  return out;
}

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
  if (line.slow) fields.push_back({"step", LongestStep(record)});
  if (line.skipped > 0) fields.push_back({"skipped", line.skipped});
  LogEvent(line.slow ? LogLevel::kWarning : LogLevel::kInfo, line.slow ? "slow call" : "call",
           fields);
}

}  // namespace awqd::obs
