// spdlog set-up and the two renderings of an event.
#include "server/obs/logging.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/time/clock.h"
#include "nlohmann/json.hpp"
#include "server/obs/line_writer.h"
#include "server/obs/log_limit.h"
#include "server/obs/terminal.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/base_sink.h"
#include "spdlog/spdlog.h"

namespace awqd::obs {
namespace {

// Events arrive rendered; everything else is a bare message that the sink still has to render. The
// logger's name tells them apart.
constexpr char kEventLogger[] = "event";

// Asked on every request, without a look into the registry of loggers.
std::atomic<bool> g_logs_requests{false};
std::atomic<bool> g_wants_requests{false};

// In ASCII where a line is JSON: nothing in it can be anything but itself. What is text passes
// OneLine at the sink.
std::string Json(absl::string_view text, LogFormat format) {
  return nlohmann::json(std::string(text))
      .dump(-1, ' ', format == LogFormat::kJson, nlohmann::json::error_handler_t::replace);
}

// Members of the JSON object, or the message on one line.
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

// `left_out`: events like it before, that were not logged.
std::string Render(absl::string_view message, absl::Span<const LogField> fields,
                   int64_t left_out = 0) {
  std::string out = g_format == LogFormat::kJson
                        ? absl::StrCat("\"message\":", Json(message, g_format))
                        : std::string(message);
  for (const LogField& field : fields) Append(field, &out);
  if (left_out > 0) Append({"left_out", left_out}, &out);
  return out;
}

class QueueSink final : public spdlog::sinks::base_sink<std::mutex> {
 protected:
  void sink_it_(const spdlog::details::log_msg& msg) override {
    spdlog::memory_buf_t line;
    formatter_->format(msg, line);
    Stderr().Write({line.data(), line.size()});
  }
  void flush_() override {}
};

std::string LostLine(spdlog::formatter& formatter, int64_t lost) {
  const std::string text = Render("log lines lost", {{"lines", lost}});
  spdlog::memory_buf_t line;
  formatter.format(
      {kEventLogger, spdlog::level::warn, spdlog::string_view_t(text.data(), text.size())}, line);
  return {line.data(), line.size()};
}

// Of one message, and of how many messages at a time.
constexpr int64_t kLinesAMinute = 100;
constexpr size_t kMessages = 256;

LogLimit& Limit() {
  static auto* const limit = new LogLimit(kLinesAMinute, absl::Minutes(1), kMessages);
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
  g_logs_requests = level == LogLevel::kDebug;
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<PayloadFlag>('*', format);
  formatter->set_pattern(format == LogFormat::kJson
                             ? R"({"time":"%Y-%m-%dT%H:%M:%S.%f%z","level":"%l","thread":%t,%*})"
                             : "%Y-%m-%dT%H:%M:%S.%f%z %L %t %*");
  ForgetTerminalSink();
  const std::shared_ptr<spdlog::sinks::sink> sink = format == LogFormat::kText && StderrIsTerminal()
                                                        ? MakeTerminalSink()
                                                        : std::make_shared<QueueSink>();
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

void LastLine(absl::string_view text, absl::Duration limit) {
  Stderr().Write(absl::StrCat(OneLine(text), "\n"));
  Stderr().Flush(limit);
}

void LogEvent(LogLevel level, absl::string_view message, absl::Span<const LogField> fields) {
  if (EventLogger()->should_log(Level(level))) Emit(level, message, fields, 0);
}

bool Logs(LogLevel level) { return EventLogger()->should_log(Level(level)); }

void LogLimited(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields) {
  if (!EventLogger()->should_log(Level(level))) return;
  const LogLimit::Verdict verdict = Limit().Ask(message, absl::Now());
  if (verdict.log) Emit(level, message, fields, verdict.left_out);
}

bool LogsRequests() {
  return g_logs_requests.load(std::memory_order_relaxed) ||
         g_wants_requests.load(std::memory_order_relaxed);
}

void WantRequests() { g_wants_requests = true; }

void LogRequest(const RequestLog& request, const absl::Status& status) {
  if (!g_logs_requests.load(std::memory_order_relaxed)) return;  // spares the escaping
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

}  // namespace awqd::obs
