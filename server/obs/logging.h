// The log: one event per line on stderr, as text or JSON, safe against names that clients choose.
//
// Messages are escaped with OneLine, so none can forge a second line. Tensor contents are never
// logged.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <type_traits>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/mutex.h"
#include "kernels/base/text.h"

namespace awqd::obs {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

// Chooses the level and the format of the log. Call it once, before threads start.
void SetUpLogging(LogLevel level, LogFormat format);

// Waits until every logged line is written, `limit` at most. Returns false when the time is over.
// Logging itself never waits: lines that nobody reads are dropped and counted.
bool FlushLog(absl::Duration limit);

// Writes a line without time and level after the logged lines, and waits as FlushLog does.
void WriteLastLine(absl::string_view text, absl::Duration limit);

// Makes text that a client sent safe for the log: cut to `max_bytes` and escaped by OneLine.
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

// Whether lines of `level` are logged. Cheap enough for every request.
bool Logs(LogLevel level);

// Logs an event that clients can cause: at most 100 lines a minute with the same message. The next
// line that is logged says in `left_out` how many were not.
void LogLimited(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields);
// As LogLimited, but at most 5 lines a minute: for what a probe or a retrying client repeats.
void LogRarely(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields);

// Limits how often lines of one kind are logged. Thread-safe.
class LogLimit {
 public:
  // Allows `lines` lines in each `window` for one key. It remembers `keys` keys; all keys beyond
  // these share one more.
  LogLimit(int64_t lines, absl::Duration window, size_t keys)
      : lines_(lines), window_(window), keys_(keys) {}

  struct Verdict {
    bool log = false;
    int64_t left_out = 0;  // lines with this key that were not logged since the last one that was
  };
  // Counts a line with `key` at `now`, and says whether to log it.
  Verdict CountLine(absl::string_view key, absl::Time now);

 private:
  struct Window {
    absl::Time begin;
    int64_t lines = 0;
    int64_t left_out = 0;
  };
  // Removes windows that have ended and have no left-out lines to report.
  void RemoveEndedWindows(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t lines_;
  const absl::Duration window_;
  const size_t keys_;
  Mutex mu_;
  std::map<std::string, Window, std::less<>> windows_ ABSL_GUARDED_BY(mu_);
};

// The status line stays beneath the log while the log's lines go on above it.
// True where the log is text and stderr is a terminal that can erase a line (not TERM=dumb).
// Thread-safe once logging is set up, as ShowStatusLine is too.
bool ShowsStatusLine();

// Replaces the status line by `text`, escaped by OneLine and cut to the terminal's width; ""
// removes the line. Does nothing unless ShowsStatusLine().
void ShowStatusLine(absl::string_view text);

}  // namespace awqd::obs
