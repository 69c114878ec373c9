// Renders events as text and as JSON, and shows the status line of a terminal.
#include "server/obs/logging.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "server/obs/line_writer.h"

namespace awqd::obs {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};
std::atomic<LogFormat> g_format{LogFormat::kText};

// Quotes `text`. JSON lines are ASCII, so nothing can hide in them; text lines keep UTF-8, because
// FormatLine escapes them with OneLine.
std::string Json(absl::string_view text, LogFormat format) {
  return nlohmann::json(std::string(text))
      .dump(-1, ' ', format == LogFormat::kJson, nlohmann::json::error_handler_t::replace);
}

std::string QuotedIfNeeded(absl::string_view value) {
  if (!value.empty() && value.find_first_of(" \"=") == absl::string_view::npos) {
    return std::string(value);
  }
  return Json(value, LogFormat::kText);
}

void Append(const LogField& field, LogFormat format, std::string* out) {
  if (format == LogFormat::kText) {
    absl::StrAppend(out, " ", field.name, "=", QuotedIfNeeded(field.value));
    return;
  }
  absl::StrAppend(out, ",", Json(field.name, format), ":",
                  field.number ? field.value : Json(field.value, format));
}

// A line with its line feed. `left_out`: how many events with this message were not logged before
// this one.
std::string FormatLine(LogLevel level, absl::string_view message, absl::Span<const LogField> fields,
                       int64_t left_out = 0) {
  constexpr absl::string_view kNames[] = {"debug", "info", "warning", "error"};
  constexpr absl::string_view kLetters[] = {"D", "I", "W", "E"};
  thread_local const pid_t thread = gettid();
  const LogFormat format = g_format;
  const bool json = format == LogFormat::kJson;
  std::string event =
      json ? absl::StrCat("\"message\":", Json(message, format)) : std::string(message);
  for (const LogField& field : fields) Append(field, format, &event);
  if (left_out > 0) Append({"left_out", left_out}, format, &event);
  const auto index = static_cast<size_t>(level);
  const std::string time =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E6S%Ez", absl::Now(), absl::LocalTimeZone());
  if (json) {
    return absl::StrCat("{\"time\":\"", time, "\",\"level\":\"", kNames[index],
                        "\",\"thread\":", thread, ",", event, "}\n");
  }
  return absl::StrCat(time, " ", kLetters[index], " ", thread, " ", OneLine(event), "\n");
}

constexpr char kEraseLine[] = "\r\x1b[K";

size_t TerminalColumns() {
  winsize size = {};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

// Whether stderr is a terminal that can erase a line: not a file, a pipe or TERM=dumb.
bool StderrIsTerminal() {
  const char* const term = std::getenv("TERM");
  return isatty(STDERR_FILENO) == 1 && term != nullptr && *term != '\0' &&
         absl::string_view(term) != "dumb";
}

// Writes lines to stderr and keeps the status line, if there is one, beneath them. Thread-safe.
class LogOutput {
 public:
  void WriteLine(const std::string& line) {
    MutexLock lock(&mu_);
    Stderr().Write(status_.empty() ? line : kEraseLine + line + ClippedStatus());
  }

  // Removes the status line, and says whether there will be one.
  void SetShowsStatus(bool shows) {
    MutexLock lock(&mu_);
    shows_status_ = shows;
    status_.clear();
  }
  bool shows_status() {
    MutexLock lock(&mu_);
    return shows_status_;
  }
  void ShowStatus(absl::string_view text) {
    std::string status = OneLine(text);
    MutexLock lock(&mu_);
    if (!shows_status_ || (status.empty() && status_.empty())) return;
    status_ = std::move(status);
    Stderr().Offer(kEraseLine + ClippedStatus());
  }

 private:
  // Leaves the last column free: some terminals move a cursor behind it to the next line.
  std::string ClippedStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return status_.substr(0, TerminalColumns() - 1);
  }

  Mutex mu_;
  bool shows_status_ ABSL_GUARDED_BY(mu_) = false;
  std::string status_ ABSL_GUARDED_BY(mu_);
};

// Never destroyed: threads may log while the process ends.
LogOutput& Output() {
  static auto* const output = new LogOutput;
  return *output;
}

// Logs the event if `limit` allows another one with this message.
void LogWithin(LogLimit& limit, LogLevel level, absl::string_view message,
               std::initializer_list<LogField> fields) {
  if (!Logs(level)) return;
  const LogLimit::Verdict verdict = limit.CountLine(message, absl::Now());
  if (verdict.log) Output().WriteLine(FormatLine(level, message, fields, verdict.left_out));
}

}  // namespace

void SetUpLogging(LogLevel level, LogFormat format) {
  g_format = format;
  g_level = level;
  Output().SetShowsStatus(format == LogFormat::kText && StderrIsTerminal());
  Stderr().set_lost_line([](int64_t lost) {
    return FormatLine(LogLevel::kWarning, "log lines lost", {{"lines", lost}});
  });
}

std::string LogText(absl::string_view text, size_t max_bytes) {
  const bool cut = text.size() > max_bytes;
  return absl::StrCat(OneLine(text.substr(0, max_bytes)), cut ? "..." : "");
}

bool FlushLog(absl::Duration limit) { return Stderr().Flush(limit); }

void WriteLastLine(absl::string_view text, absl::Duration limit) {
  Stderr().Write(absl::StrCat(OneLine(text), "\n"));
  Stderr().Flush(limit);
}

bool Logs(LogLevel level) { return level >= g_level.load(std::memory_order_relaxed); }

void LogEvent(LogLevel level, absl::string_view message, absl::Span<const LogField> fields) {
  if (Logs(level)) Output().WriteLine(FormatLine(level, message, fields));
}

void LogLimited(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields) {
  static auto* const limit = new LogLimit(/*lines=*/100, absl::Minutes(1), /*keys=*/256);
  LogWithin(*limit, level, message, fields);
}

void LogRarely(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields) {
  static auto* const limit = new LogLimit(/*lines=*/5, absl::Minutes(1), /*keys=*/256);
  LogWithin(*limit, level, message, fields);
}

LogLimit::Verdict LogLimit::CountLine(absl::string_view key, absl::Time now) {
  MutexLock lock(&mu_);
  auto it = windows_.find(key);
  if (it == windows_.end() && windows_.size() >= keys_) RemoveEndedWindows(now);
  if (it == windows_.end()) {
    const bool full = windows_.size() >= keys_;
    it = windows_.try_emplace(full ? std::string() : std::string(key), Window{now}).first;
  }
  Window& window = it->second;
  if (now - window.begin >= window_ || now < window.begin) {
    window.begin = now;
    window.lines = 0;
  }
  if (window.lines == lines_) {
    ++window.left_out;
    return {};
  }
  ++window.lines;
  return {true, std::exchange(window.left_out, 0)};
}

void LogLimit::RemoveEndedWindows(absl::Time now) {
  for (auto it = windows_.begin(); it != windows_.end();) {
    const bool over = now - it->second.begin >= window_ && it->second.left_out == 0;
    it = over ? windows_.erase(it) : std::next(it);
  }
}

bool ShowsStatusLine() { return Output().shows_status(); }

void ShowStatusLine(absl::string_view text) { Output().ShowStatus(text); }

}  // namespace awqd::obs
