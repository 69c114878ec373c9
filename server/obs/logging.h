// Logs: one event per line on stderr, as text or as JSON, safe against what clients put in names.
//
// Other rooms may log through spdlog as usual: the sink escapes what OneLine does, so no message
// can forge a second line. Tensor contents are never logged.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/text.h"
#include "server/obs/span_ref.h"

namespace awqd::obs {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

// Replaces the process's default logger. Not thread-safe; called once, before threads start.
void SetUpLogging(LogLevel level, LogFormat format);

// Waits until everything that was logged is written, `limit` at most; false: it is not. Logging
// itself never waits: lines that nobody reads are lost, and counted.
bool FlushLog(absl::Duration limit);

// A line without time and level, behind what was logged. Waits as FlushLog does.
void LastLine(absl::string_view text, absl::Duration limit);

// For what a client sent: `text` as OneLine makes it, cut to `max_bytes`.
std::string LogText(absl::string_view text, size_t max_bytes = 256);

// One named value of an event. Numbers stay numbers in JSON.
struct LogField {
  LogField(absl::string_view name, absl::string_view text) : name(name), value(text) {}
  template <typename T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
  LogField(absl::string_view name, T number)
      : name(name), value(absl::StrCat(number)), number(true) {}

  absl::string_view name;
  std::string value;
  bool number = false;
};

// Text: "message name=value name=\"two words\"". JSON: {"time", "level", "message", name: value}.
void LogEvent(LogLevel level, absl::string_view message, absl::Span<const LogField> fields);
inline void LogEvent(LogLevel level, absl::string_view message,
                     std::initializer_list<LogField> fields) {
  LogEvent(level, message, absl::Span<const LogField>(fields.begin(), fields.size()));
}

// Whether anything of that level is logged.
bool Logs(LogLevel level);

// For events that clients cause: at most 100 of the same message a minute. The first one after that
// says in `left_out` how many were not logged.
void LogLimited(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields);

// When the flow of a request came to its ends; InfinitePast: it did not.
struct RequestMoments {
  absl::Time begun = absl::InfinitePast();
  absl::Time submitted = absl::InfinitePast();  // to the engine
  absl::Time settled = absl::InfinitePast();    // the answer is there, but not sent
};

// The batch that a request was computed in.
struct BatchNote {
  int64_t id = 0;  // 0: none
  int64_t tokens = 0;
  int32_t requests = 0;
  SpanRefs calls;  // as engine::ExecutionReport has them
};

// What is known of one request: logged at debug level, and in the notes of its call.
struct RequestLog {
  absl::string_view method;  // "QuantizedMatmul"
  std::string request_id;    // as the client sent it; escaped here
  std::string model;         // empty for an inline weight
  std::string weight;
  int64_t tokens = 0;
  int64_t queue_us = 0;
  int64_t compute_us = 0;
  int64_t total_us = 0;
  int64_t bytes_in = 0;
  int64_t bytes_out = 0;
  std::string kernel;
  BatchNote batch;
  RequestMoments moments;
};

// Whether anybody wants to know of requests, the log or a recorder of calls. When not, callers need
// not fill a RequestLog.
bool LogsRequests();
// Somebody does, whatever the level of the log. Set before threads start.
void WantRequests();

void LogRequest(const RequestLog& request, const absl::Status& status);

}  // namespace awqd::obs
