// Log lines: one for each event whatever its text, in both formats.
#include "server/obs/logging.h"

#include <algorithm>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/obs/call_record.h"

namespace awqd::obs {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

template <typename F>
std::string Logged(LogFormat format, F&& body) {
  SetUpLogging(LogLevel::kDebug, format);
  testing::internal::CaptureStderr();
  body();
  EXPECT_TRUE(FlushLog(absl::Seconds(20)));
  return testing::internal::GetCapturedStderr();
}

RequestLog Hostile() {
  RequestLog log;
  log.method = "QuantizedMatmul";
  log.request_id = "a\nforged line \x1b[31m\" }";
  log.weight = std::string(1 << 20, 'w');
  log.tokens = 5;
  return log;
}

TEST(Logging, TextIsOneEscapedLine) {
  const std::string line =
      Logged(LogFormat::kText, [] { LogRequest(Hostile(), absl::NotFoundError("no\nsuch")); });
  EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1);
  EXPECT_THAT(line, Not(HasSubstr("\x1b")));
  EXPECT_THAT(line, HasSubstr("tokens=5"));
  EXPECT_THAT(line, HasSubstr("status=NOT_FOUND"));
  EXPECT_LT(line.size(), 2000u);
}

TEST(Logging, JsonIsOneObjectALine) {
  const std::string line =
      Logged(LogFormat::kJson, [] { LogRequest(Hostile(), absl::OkStatus()); });
  const nlohmann::json object = nlohmann::json::parse(line);
  EXPECT_EQ(object["message"], "request");
  EXPECT_EQ(object["tokens"], 5);
  EXPECT_EQ(object["status"], "OK");
  EXPECT_EQ(object["level"], "debug");
}

TEST(Logging, PlainMessagesAreSafeToo) {
  const std::string text =
      Logged(LogFormat::kText, [] { LogEvent(LogLevel::kInfo, "two\nlines", {}); });
  EXPECT_THAT(text, HasSubstr("two\\nlines"));
  const std::string json =
      Logged(LogFormat::kJson, [] { LogEvent(LogLevel::kInfo, "two\nlines \xff", {}); });
  EXPECT_THAT(std::string(nlohmann::json::parse(json)["message"]), HasSubstr("two\nlines"));
}

TEST(Logging, NothingHidesInEitherFormat) {
  RequestLog log = Hostile();
  log.request_id = "a\u202eb\u0085c\u2028d\x9b";
  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    const std::string line = Logged(format, [&] {
      LogRequest(log, absl::OkStatus());
      LogEvent(LogLevel::kInfo, log.request_id, {{log.request_id, log.request_id}});
      LogEvent(LogLevel::kInfo, log.request_id, {});
    });
    EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 3);
    for (const char c : line) EXPECT_LT(static_cast<unsigned char>(c), 0x7f) << line;
  }
}

TEST(Logging, AMessageThatClientsCauseIsLoggedSoOften) {
  const std::string log = Logged(LogFormat::kText, [] {
    for (int i = 0; i < 1000; ++i) LogLimited(LogLevel::kWarning, "limited", {{"i", i}});
    LogLimited(LogLevel::kWarning, "another", {});
    for (int i = 0; i < 1000; ++i) LogRarely(LogLevel::kWarning, "rare", {});
    for (int i = 0; i < 200; ++i) LogEvent(LogLevel::kWarning, "unlimited", {});
  });
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 100 + 1 + 5 + 200);
}

TEST(Logging, LevelsAreKept) {
  SetUpLogging(LogLevel::kInfo, LogFormat::kText);
  testing::internal::CaptureStderr();
  LogRequest(Hostile(), absl::OkStatus());
  EXPECT_TRUE(FlushLog(absl::Seconds(20)));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace awqd::obs
