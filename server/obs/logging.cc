// spdlog set-up and the two renderings of an event.
#include "server/obs/logging.h"

#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "nlohmann/json.hpp"
#include "server/obs/terminal.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace awqd::obs {
namespace {

// Events arrive rendered; everything else is a bare message that the sink still has to render. The
// logger's name tells them apart.
constexpr char kEventLogger[] = "event";

// Asked on every request, without a look into the registry of loggers.
std::atomic<bool> g_logs_requests{false};
std::atomic<bool> g_wants_requests{false};

std::string Json(absl::string_view text) {
  return nlohmann::json(std::string(text))
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Members of the JSON object, or the message with its control characters escaped.
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
      out = absl::StrCat("\"message\":", Json(payload));
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
  return Json(value);
}

std::string Render(absl::string_view message, absl::Span<const LogField> fields) {
  const bool json = g_format == LogFormat::kJson;
  std::string out = json ? absl::StrCat("\"message\":", Json(message)) : std::string(message);
  for (const LogField& field : fields) {
    if (json) {
      absl::StrAppend(&out, ",", Json(field.name), ":",
                      field.number ? field.value : Json(field.value));
    } else {
      absl::StrAppend(&out, " ", field.name, "=", QuotedIfNeeded(field.value));
    }
  }
  return out;
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
  const std::shared_ptr<spdlog::sinks::sink> sink =
      format == LogFormat::kText && StderrIsTerminal()
          ? MakeTerminalSink()
          : std::make_shared<spdlog::sinks::stderr_sink_mt>();
  sink->set_formatter(std::move(formatter));
  for (const char* name : {kEventLogger, ""}) {
    auto logger = std::make_shared<spdlog::logger>(name, sink);
    logger->set_level(Level(level));
    logger->flush_on(spdlog::level::debug);
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

std::string OneLine(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
    if (control) {
      absl::StrAppend(&out, absl::CHexEscape(absl::string_view(&c, 1)));
    } else {
      out.push_back(c);
    }
  }
  return out;
}

void LogEvent(LogLevel level, absl::string_view message, absl::Span<const LogField> fields) {
  const std::shared_ptr<spdlog::logger> logger = EventLogger();
  if (!logger->should_log(Level(level))) return;
  const std::string line = Render(message, fields);
  logger->log(Level(level), spdlog::string_view_t(line.data(), line.size()));
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
