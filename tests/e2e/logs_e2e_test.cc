// The real binary's log: one event a line, whatever names clients send.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <map>
#include <thread>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using client::Tensor;
using client::WeightName;

// Text that would be a line of its own, in both formats, without escaping.
constexpr char kForgery[] =
    "x\n2026-01-01T00:00:00.000000+00:00 I 1 forged\r\n"
    "{\"time\":\"now\",\"level\":\"info\",\"message\":\"forged\"}\n\x1b[2J\x7f\",\"message\":"
    "\"forged";

class LogsTest : public ServerTest {
 protected:
  LogsTest() { SyntheticAwq::Random(64, 16, 32, 1).Write(repository_ / "m"); }

  // The lines that a server wrote while clients sent hostile names.
  std::vector<std::string> Lines(const std::string& format) {
    Start({"--log_level=debug", "--access_log=all", "--log_format=" + format});
    client::MatmulCall call = {.weight = WeightName{"m", "layer"},
                               .activations = {v1::FP16, {1, 64}, std::string(128, '\0')},
                               .request_id = kForgery};
    EXPECT_TRUE(client_->QuantizedMatmul(call).ok());
    call.weight = WeightName{"m", kForgery};
    EXPECT_FALSE(client_->QuantizedMatmul(call).ok());
    call.weight = WeightName{kForgery, kForgery};
    EXPECT_FALSE(client_->QuantizedMatmul(call).ok());
    EXPECT_FALSE(client_->Dequantize({.weight = WeightName{kForgery, "layer"}}).ok());
    EXPECT_FALSE(client_->LoadModel(kForgery).ok());
    EXPECT_FALSE(client_->LoadModel("absent").ok());
    EXPECT_FALSE(client_->GetModel(kForgery).ok());
    EXPECT_FALSE(client_->UnloadModel(kForgery).ok());
    // A string that is not valid: the parser logs it.
    v1::DequantizeRequest request;
    request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(6, "\xc3\x28");
    grpc::ClientContext context;
    v1::DequantizeResponse response;
    EXPECT_EQ(stub_->Dequantize(&context, request, &response).error_code(), grpc::INVALID_ARGUMENT);
    std::vector<std::string> lines = absl::StrSplit(Stop().log, '\n');
    EXPECT_EQ(lines.back(), "");
    lines.pop_back();
    return lines;
  }
};

TEST_F(LogsTest, EveryJsonLineIsAnEventOfTheServer) {
  std::map<std::string, int> events;
  std::map<std::string, int> forged_ids;  // by kind of line that has the request's id
  for (const std::string& line : Lines("json")) {
    const auto event = nlohmann::json::parse(line, nullptr, false);
    ASSERT_TRUE(event.is_object()) << line;
    for (const char* member : {"time", "level", "message"}) {
      ASSERT_TRUE(event.contains(member) && event[member].is_string()) << line;
    }
    ++events[event["message"].get<std::string>()];
    if (event.contains("request_id")) {
      const bool forged = absl::StartsWith(event["request_id"].get<std::string>(), "x\\n2026");
      const std::string message = event["message"];
      forged_ids[message == "slow call" ? "call" : message] += forged ? 1 : 0;
    }
  }
  EXPECT_EQ(events.count("forged"), 0u);
  EXPECT_EQ(events["ready"], 1);
  EXPECT_EQ(events["request"], 5);
  EXPECT_EQ(events["stopped"], 1);
  EXPECT_THAT(forged_ids, ::testing::UnorderedElementsAre(::testing::Pair("request", 3),
                                                          ::testing::Pair("call", 3)));
}

TEST_F(LogsTest, EveryTextLineBeginsWithItsTime) {
  int requests = 0;
  for (const std::string& line : Lines("text")) {
    absl::Time time;
    const std::string stamp = line.substr(0, line.find(' '));
    ASSERT_TRUE(absl::ParseTime(absl::RFC3339_full, stamp, &time, nullptr)) << line;
    EXPECT_GT(absl::Now() - time, -absl::Minutes(1)) << line;
    EXPECT_LT(absl::Now() - time, absl::Minutes(5)) << line;
    for (const char c : line) ASSERT_FALSE(c == '\x1b' || c == '\r' || c == '\x7f') << line;
    requests += absl::StrContains(line, " request ") ? 1 : 0;
  }
  EXPECT_EQ(requests, 5);
}

// A log into a pipe of one page that is not read until the test reads it.
class UnreadLogTest : public LogsTest {
 protected:
  UnreadLogTest() {
    EXPECT_EQ(pipe2(ends_, O_CLOEXEC), 0);
    fcntl(ends_[1], F_SETPIPE_SZ, 4096);
    StartUnread({});
  }
  ~UnreadLogTest() override {
    server_ = nullptr;
    close(ends_[0]);
    close(ends_[1]);
  }

  void StartUnread(std::vector<std::string> args) {
    args.push_back("--log_level=debug");
    Start(std::move(args), "127.0.0.1:0", ends_[1]);
  }

  // More than the pipe and the server hold: three kilobytes a call.
  void LogMegabytes() {
    const std::string name(250, '\x01');
    for (int i = 0; i < 1000; ++i) {
      EXPECT_FALSE(
          client_->Dequantize({.weight = WeightName{name, name}, .request_id = name}).ok());
    }
  }

  int ends_[2] = {-1, -1};
};

TEST_F(UnreadLogTest, HoldsNeitherCallsNorLoadsNorTheEndUp) {
  LogMegabytes();
  EXPECT_TRUE(client_->LoadModel("m", {.timeout = absl::Seconds(20)}).ok());
  EXPECT_FALSE(client_->LoadModel("absent", {.timeout = absl::Seconds(20)}).ok());
  EXPECT_LT(Stop().took, absl::Seconds(10));
}

TEST_F(UnreadLogTest, DoesNotKeepALaterSignalFromEndingTheProcess) {
  StartUnread({"--drain_delay_ms=60000"});
  LogMegabytes();
  server_->Signal(SIGTERM);
  for (int i = 0; i < 1000 && client_->IsServing("").value_or(false); ++i) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  absl::SleepFor(absl::Milliseconds(1100));  // an earlier signal would count as the same one
  server_->Signal(SIGTERM);
  const ExitReport report = server_->Wait();
  EXPECT_EQ(report.code, 128 + SIGTERM);
  EXPECT_LT(report.took, absl::Seconds(5));
}

TEST_F(UnreadLogTest, TellsWhatWasLostWhenItIsReadAgain) {
  LogMegabytes();
  std::string log;
  char block[65536];
  while (!absl::StrContains(log, "log lines lost lines=")) {
    const ssize_t n = read(ends_[0], block, sizeof(block));
    ASSERT_GT(n, 0);
    log.append(block, static_cast<size_t>(n));
    ASSERT_LT(log.size(), size_t{100} << 20);
  }
  const std::string rest = log.substr(log.find("log lines lost lines=") + 21);
  EXPECT_GT(std::stoi(rest), 100);
  EXPECT_THAT(log, ::testing::HasSubstr(" ready models=1"));
  std::thread reader([&] {
    while (read(ends_[0], block, sizeof(block)) > 0) {
    }
  });
  Stop();
  close(ends_[1]);
  ends_[1] = -1;
  reader.join();
}

TEST_F(LogsTest, LoadsThatFailAreLoggedSoOften) {
  Start();
  for (int i = 0; i < 500; ++i) EXPECT_FALSE(client_->LoadModel("absent").ok());
  const std::vector<std::string> parts = absl::StrSplit(Stop().log, " load model ");
  // At most 101 in any minute, if the test took two minutes.
  EXPECT_GE(parts.size() - 1, 100u);
  EXPECT_LE(parts.size() - 1, 200u);
}

TEST(DemoLogTest, HasOneLineAModelAndNoWarning) {
  const auto lines_of = [](const char* level, absl::string_view part) {
    ServerProcess server({"--model_repository=" + DemoRepository(), level});
    EXPECT_TRUE(server.WaitServing()) << server.log();
    const std::string log = server.Stop().log;
    EXPECT_THAT(log, ::testing::Not(::testing::HasSubstr(" W ")));
    const std::vector<std::string> lines = absl::StrSplit(log, '\n');
    return absl::c_count_if(lines,
                            [&](const std::string& line) { return absl::StrContains(line, part); });
  };
  EXPECT_EQ(lines_of("--log_level=info", kDemoModel), 1);
  EXPECT_EQ(lines_of("--log_level=debug", " plan model="), 3) << "one for each shape";
}

}  // namespace
}  // namespace awqd
