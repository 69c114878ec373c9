// Sets spdlog up, renders events as text and as JSON, and shows the status line of a terminal.
#include "server/obs/logging.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "server/obs/line_writer.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/spdlog.h"

namespace awqd::obs {
namespace {

// LogEvent renders its events itself. Messages of other loggers are rendered by the sink, which
// tells the two apart by the logger's name.
constexpr char kEventLogger[] = "event";

std::atomic<LogLevel> g_level{LogLevel::kInfo};

// Quotes `text`. JSON lines are ASCII, so nothing can hide in them; text lines keep UTF-8, because
// the sink escapes them with OneLine.
std::string Json(absl::string_view text, LogFormat format) {
  return nlohmann::json(std::string(text))
      .dump(-1, ' ', format == LogFormat::kJson, nlohmann::json::error_handler_t::replace);
}

// Formats the payload of a line: the members of a JSON object, or the message as text.
class PayloadFlag : public spdlog::custom_flag_formatter {
 public:
  explicit PayloadFlag(LogFormat format) : format_(format) {}

  void format(const spdlog::details::log_msg& msg, const std::tm&,
              spdlog::memory_buf_t& dest) override {
    const absl::string_view payload(msg.payload.data(), msg.payload.size());
    std::string out;
    if (format_ == LogFormat::kText) {
      out = OneLine(payload);
    } else if (absl::string_view(msg.logger_name.data(), msg.logger_name.size()) == kEventLogger) {
      out = std::string(payload);
    } else {
      out = absl::StrCat("\"message\":", Json(payload, format_));
    }
    dest.append(out.data(), out.data() + out.size());
  }

  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<PayloadFlag>(format_);
  }

 private:
  const LogFormat format_;
};

LogFormat g_format = LogFormat::kText;

spdlog::level::level_enum Level(LogLevel level) {
  constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                   spdlog::level::warn, spdlog::level::err};
  return kLevels[static_cast<int>(level)];
}

std::shared_ptr<spdlog::logger> EventLogger() {
  std::shared_ptr<spdlog::logger> logger = spdlog::get(kEventLogger);
  return logger != nullptr ? logger : spdlog::default_logger();
}

std::string QuotedIfNeeded(absl::string_view value) {
  if (!value.empty() && value.find_first_of(" \"=") == absl::string_view::npos) {
    return std::string(value);
  }
  return Json(value, LogFormat::kText);
}

void Append(const LogField& field, std::string* out) {
  if (g_format == LogFormat::kText) {
    absl::StrAppend(out, " ", field.name, "=", QuotedIfNeeded(field.value));
    return;
  }
  absl::StrAppend(out, ",", Json(field.name, g_format), ":",
                  field.number ? field.value : Json(field.value, g_format));
}

// `left_out`: how many events with this message were not logged before this one.
std::string Render(absl::string_view message, absl::Span<const LogField> fields,
                   int64_t left_out = 0) {
  std::string out = g_format == LogFormat::kJson
                        ? absl::StrCat("\"message\":", Json(message, g_format))
                        : std::string(message);
  for (const LogField& field : fields) Append(field, &out);
  if (left_out > 0) Append({"left_out", left_out}, &out);
  return out;
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

// Writes lines to stderr and keeps the status line, if there is one, beneath them. The sink's mutex
// orders both.
class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  void SetStatus(absl::string_view text) {
    const std::string status = OneLine(text);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status.empty() && status_.empty()) return;
    status_ = status;
    Stderr().Offer(kEraseLine + ClippedStatus());
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& msg) override {
    spdlog::memory_buf_t line;
    formatter_->format(msg, line);
    const std::string text(line.data(), line.size());
    Stderr().Write(status_.empty() ? text : kEraseLine + text + ClippedStatus());
  }
  void flush_() override {}

 private:
  // Leaves the last column free: some terminals move a cursor behind it to the next line.
  std::string ClippedStatus() const { return status_.substr(0, TerminalColumns() - 1); }

  std::string status_;
};

std::shared_ptr<StderrSink> g_status_sink;  // null: there is no status line

std::string LostLine(spdlog::formatter& formatter, int64_t lost) {
  const std::string text = Render("log lines lost", {{"lines", lost}});
  spdlog::memory_buf_t line;
  formatter.format(
      {kEventLogger, spdlog::level::warn, spdlog::string_view_t(text.data(), text.size())}, line);
  return {line.data(), line.size()};
}

LogLimit& LimitOfMessages() {
  static auto* const limit = new LogLimit(/*lines=*/100, absl::Minutes(1), /*keys=*/256);
  return *limit;
}

void Emit(LogLevel level, absl::string_view message, absl::Span<const LogField> fields,
          int64_t left_out) {
  const std::string line = Render(message, fields, left_out);
  EventLogger()->log(Level(level), spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace

void SetUpLogging(LogLevel level, LogFormat format) {
  g_format = format;
  g_level = level;
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<PayloadFlag>('*', format);
  formatter->set_pattern(format == LogFormat::kJson
                             ? R"({"time":"%Y-%m-%dT%H:%M:%S.%f%z","level":"%l","thread":%t,%*})"
                             : "%Y-%m-%dT%H:%M:%S.%f%z %L %t %*");
  const auto sink = std::make_shared<StderrSink>();
  g_status_sink = format == LogFormat::kText && StderrIsTerminal() ? sink : nullptr;
  Stderr().set_lost_line([formatter = std::shared_ptr<spdlog::formatter>(formatter->clone())](
                             int64_t lost) { return LostLine(*formatter, lost); });
  sink->set_formatter(std::move(formatter));
  for (const char* name : {kEventLogger, ""}) {
    auto logger = std::make_shared<spdlog::logger>(name, sink);
    logger->set_level(Level(level));
    if (*name != '\0') {
      spdlog::drop(name);
      spdlog::register_logger(std::move(logger));
    } else {
      spdlog::set_default_logger(std::move(logger));
    }
  }
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
  if (Logs(level)) Emit(level, message, fields, 0);
}

void LogLimited(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields) {
  if (!Logs(level)) return;
  const LogLimit::Verdict verdict = LimitOfMessages().CountLine(message, absl::Now());
  if (verdict.log) Emit(level, message, fields, verdict.left_out);
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

bool ShowsStatusLine() { return g_status_sink != nullptr; }

void ShowStatusLine(absl::string_view text) {
  if (g_status_sink != nullptr) g_status_sink->SetStatus(text);
}

}  // namespace awqd::obs
