// The real binary's log: one event a line, whatever clients put into their names.
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "awqd/v1/inference.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/server_process.h"
#include "tests/e2e/synthetic_awq.h"

namespace awqd {
namespace {

using client::Tensor;
using client::WeightName;

// What would stand on a line of its own, as text and as JSON, if it could.
constexpr char kForgery[] =
    "x\n2026-01-01T00:00:00.000000+00:00 I 1 forged\r\n"
    "{\"time\":\"now\",\"level\":\"info\",\"message\":\"forged\"}\n\x1b[2J\x7f\",\"message\":"
    "\"forged";

class LogsTest : public testing::Test {
 protected:
  LogsTest() { SyntheticAwq::Random(64, 16, 32, 1).Write(repository_ / "m"); }

  // The lines that a server wrote while clients did their worst.
  std::vector<std::string> Lines(const std::string& format) {
    ServerProcess server({"--model_repository=" + repository_.path(), "--log_level=debug",
                          "--log_format=" + format});
    EXPECT_TRUE(server.WaitServing()) << server.log();
    const auto client = server.NewClient();
    client::MatmulCall call = {.weight = WeightName{"m", "layer"},
                               .activations = {v1::FP16, {1, 64}, std::string(128, '\0')},
                               .request_id = kForgery};
    EXPECT_TRUE(client->QuantizedMatmul(call).ok());
    call.weight = WeightName{"m", kForgery};
    EXPECT_FALSE(client->QuantizedMatmul(call).ok());
    call.weight = WeightName{kForgery, kForgery};
    EXPECT_FALSE(client->QuantizedMatmul(call).ok());
    EXPECT_FALSE(client->Dequantize({.weight = WeightName{kForgery, "layer"}}).ok());
    EXPECT_FALSE(client->LoadModel(kForgery).ok());
    EXPECT_FALSE(client->LoadModel("absent").ok());
    EXPECT_FALSE(client->GetModel(kForgery).ok());
    EXPECT_FALSE(client->UnloadModel(kForgery).ok());
    // No string: the parser complains of it.
    v1::DequantizeRequest request;
    request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(6, "\xc3\x28");
    grpc::ClientContext context;
    v1::DequantizeResponse response;
    EXPECT_EQ(v1::QuantizedInference::NewStub(
                  grpc::CreateChannel(server.address(), grpc::InsecureChannelCredentials()))
                  ->Dequantize(&context, request, &response)
                  .error_code(),
              grpc::INVALID_ARGUMENT);
    const ExitReport report = server.Stop();
    EXPECT_EQ(report.code, 0) << report.log;
    std::vector<std::string> lines = absl::StrSplit(report.log, '\n');
    EXPECT_EQ(lines.back(), "");
    lines.pop_back();
    return lines;
  }

  TempFolder repository_;
};

TEST_F(LogsTest, EveryJsonLineIsAnEventOfTheServer) {
  std::map<std::string, int> events;
  int forged_ids = 0;
  for (const std::string& line : Lines("json")) {
    const auto event = nlohmann::json::parse(line, nullptr, false);
    ASSERT_TRUE(event.is_object()) << line;
    for (const char* member : {"time", "level", "message"}) {
      ASSERT_TRUE(event.contains(member) && event[member].is_string()) << line;
    }
    ++events[event["message"].get<std::string>()];
    if (event.contains("request_id")) {
      forged_ids += absl::StartsWith(event["request_id"].get<std::string>(), "x\\n2026") ? 1 : 0;
    }
  }
  EXPECT_EQ(events.count("forged"), 0u);
  EXPECT_EQ(events["ready"], 1);
  EXPECT_EQ(events["request"], 5);
  EXPECT_EQ(events["stopped"], 1);
  EXPECT_EQ(forged_ids, 3);
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

}  // namespace
}  // namespace awqd
