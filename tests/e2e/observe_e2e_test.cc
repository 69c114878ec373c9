// The real server for operators: metrics, access log, traces.
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "awqd/v1/inference.grpc.pb.h"
#include "awqd/v1/server_info.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/http2.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/synthetic_awq.h"
#include "tests/server/obs/http_get.h"
#include "tests/server/services/raw_call.h"
#include "xds/data/orca/v3/orca_load_report.pb.h"

namespace awqd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::HttpGet;
using ::testing::Not;

constexpr char kTraceparent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

v1::QuantizedMatmulRequest Request(const std::string& model, const std::string& weight) {
  v1::QuantizedMatmulRequest request;
  request.mutable_weight()->set_model(model);
  request.mutable_weight()->set_weight(weight);
  request.mutable_activations()->set_dtype(v1::FP16);
  request.mutable_activations()->add_shape(2);
  request.mutable_activations()->add_shape(64);
  request.mutable_activations()->set_raw(std::string(256, '\0'));
  return request;
}

class ObserveTest : public ::testing::Test {
 protected:
  ObserveTest() { SyntheticAwq::Random(64, 16, 32, 1).Write(repository_ / "m"); }

  void Start(std::vector<std::string> args = {}) {
    args.insert(args.end(), {"--model_repository=" + repository_.path(),
                             "--metrics_address=127.0.0.1:0", "--log_format=json"});
    server_ = std::make_unique<ServerProcess>(args);
    ASSERT_TRUE(server_->WaitServing()) << server_->log();
    stub_ = v1::QuantizedInference::NewStub(
        grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
    port_ = static_cast<int>(Event("metrics")["port"]);
  }

  // The first line of the log with that message; fails the test without one.
  nlohmann::json Event(const std::string& message) const {
    for (const absl::string_view line : absl::StrSplit(server_->log(), '\n')) {
      const nlohmann::json event = nlohmann::json::parse(line, nullptr, false);
      if (event.is_object() && event.value("message", "") == message) return event;
    }
    ADD_FAILURE() << message << " is not in\n" << server_->log();
    return {};
  }

  grpc::Status Call(const std::string& model, const std::string& weight,
                    grpc::ClientContext* context) {
    v1::QuantizedMatmulResponse response;
    return stub_->QuantizedMatmul(context, Request(model, weight), &response);
  }
  grpc::Status Call(const std::string& model = "m", const std::string& weight = "layer") {
    grpc::ClientContext context;
    return Call(model, weight, &context);
  }

  std::string Metrics() const { return HttpGet(port_, "/metrics").body; }
  // The value of a series; -1 without one.
  double Value(const std::string& series) const {
    const std::string text = Metrics();
    const size_t at = text.find("\n" + series + " ");
    double value = -1;
    if (at == std::string::npos) return value;
    const size_t begin = at + series.size() + 2;
    EXPECT_TRUE(absl::SimpleAtod(text.substr(begin, text.find('\n', begin) - begin), &value));
    return value;
  }

  template <typename Condition>
  static bool Eventually(Condition condition) {
    for (const absl::Time until = absl::Now() + absl::Seconds(20); absl::Now() < until;) {
      if (condition()) return true;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }

  TempFolder repository_;
  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<v1::QuantizedInference::Stub> stub_;
  int port_ = 0;
};

TEST_F(ObserveTest, OrcaReportsTellOfTheLoad) {
  Start({"--orca"});
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop) EXPECT_TRUE(Call().ok());
  });
  services::RawStream reports(
      grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()),
      "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics");
  ASSERT_TRUE(reports.Write("") && reports.WritesDone());
  for (int i = 0; i < 2; ++i) {
    std::string bytes;
    xds::data::orca::v3::OrcaLoadReport report;
    EXPECT_TRUE(reports.Read(&bytes) && report.ParseFromString(bytes));
    EXPECT_GT(report.cpu_utilization(), 0);
    EXPECT_GT(report.mem_utilization(), 0);
    EXPECT_LT(report.mem_utilization(), 1);
    EXPECT_GT(report.rps_fractional(), 0);
    EXPECT_GT(report.application_utilization(), 0) << "the device computes";
    EXPECT_GT(report.named_metrics().at("tokens_per_s"), report.rps_fractional());
  }
  stop = true;
  caller.join();
  EXPECT_EQ(server_->Stop().code, 0);
  EXPECT_EQ(reports.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

// gRPC's clients hide this metadata, so it is read from the wire.
TEST_F(ObserveTest, ACallForAResultEndsWithAnOrcaReport) {
  const auto end_of_call = [this] {
    const int port = PortOf(server_->address());
    const std::string request = Request("m", "layer").SerializeAsString();
    Socket socket(port);
    socket.Send(
        Hello() + Frame(kHeaders, kEndHeaders, 1, CallHeaders()) +
        Frame(kData, kEndStream, 1, Message(static_cast<uint32_t>(request.size()), request)));
    bool closed = false;
    return PayloadsOf(kHeaders, socket.Receive(1000, &closed));
  };
  constexpr char kReport[] = "endpoint-load-metrics-bin";
  Start({"--orca"});
  EXPECT_THAT(end_of_call(), AllOf(HasSubstr(kReport), HasSubstr("grpc-status")));
  EXPECT_EQ(server_->Stop().code, 0);
  Start();
  EXPECT_THAT(end_of_call(), AllOf(Not(HasSubstr(kReport)), HasSubstr("grpc-status")));
}

TEST_F(ObserveTest, MetricsCountWhatHappened) {
  Start();
  EXPECT_EQ(HttpGet(port_, "/livez").code, 200);
  EXPECT_EQ(HttpGet(port_, "/readyz").code, 200);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Call().ok());
  EXPECT_EQ(Call("m", "nope").error_code(), grpc::NOT_FOUND);
  const std::string method = "grpc_method=\"awqd.v1.QuantizedInference/QuantizedMatmul\"";
  EXPECT_EQ(Value(absl::StrCat("grpc_server_call_started_total{", method, "}")), 4);
  EXPECT_EQ(Value(absl::StrCat("grpc_server_call_duration_seconds_count{", method,
                               ",grpc_status=\"OK\"}")),
            3);
  EXPECT_EQ(Value(absl::StrCat("grpc_server_call_duration_seconds_count{", method,
                               ",grpc_status=\"NOT_FOUND\"}")),
            1);
  EXPECT_EQ(Value("awqd_model_requests_total{model=\"m\"}"), 3);
  EXPECT_EQ(Value("awqd_model_tokens_total{model=\"m\"}"), 6);
  EXPECT_EQ(Value("awqd_batch_tokens_sum{device=\"cpu\"}"), 6);
  EXPECT_EQ(Value("awqd_queue_duration_seconds_count{device=\"cpu\"}"), 3);
  EXPECT_GT(Value("awqd_model_weights_bytes{model=\"m\",device=\"cpu\"}"), 0);
  EXPECT_EQ(Value("awqd_model_load_duration_seconds_count{outcome=\"ok\"}"), 1);
  EXPECT_EQ(Value("awqd_ready"), 1);
  EXPECT_THAT(Metrics(), HasSubstr("awqd_kernel_batches_total{device=\"cpu\",kernel=\"cpu/"));

  const auto client = server_->NewClient();
  ASSERT_FALSE(client->LoadModel("absent").ok());
  EXPECT_EQ(Value("awqd_model_load_duration_seconds_count{outcome=\"failed\"}"), 1);
  const auto info = client->GetServerInfo();
  ASSERT_TRUE(info.ok());
  ASSERT_EQ(info->counters().models_size(), 1);
  EXPECT_EQ(info->counters().models(0).tokens(), 6);
  EXPECT_EQ(info->counters().devices(0).requests(), 3);
  EXPECT_EQ(info->counters().failed_calls(), 2);

  ASSERT_TRUE(client->LoadModel("m").ok());
  EXPECT_EQ(Value("awqd_model_requests_total{model=\"m\"}"), 3) << "a reload starts no new series";
  ASSERT_TRUE(client->UnloadModel("m").ok());
  EXPECT_THAT(Metrics(), Not(HasSubstr("model=\"m\""))) << "it is not served any more";
  EXPECT_EQ(server_->Stop().code, 0);
}

TEST_F(ObserveTest, PromtoolFindsNothing) {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0) GTEST_SKIP() << "no promtool";
  Start();
  ASSERT_TRUE(Call().ok());
  const std::string file = repository_ / "metrics";
  std::ofstream(file) << Metrics();
  const int code = std::system(absl::StrCat("promtool check metrics <", file, " >", file,
                                            ".out 2>&1 && ! test -s ", file, ".out")
                                   .c_str());
  std::ifstream out(file + ".out");
  EXPECT_EQ(code, 0) << std::string(std::istreambuf_iterator<char>(out), {});
}

TEST_F(ObserveTest, AnAccessLogHasALineForACall) {
  Start({"--access_log=all"});
  grpc::ClientContext context;
  context.AddMetadata("traceparent", kTraceparent);
  ASSERT_TRUE(Call("m", "layer", &context).ok());
  const auto answered = context.GetServerInitialMetadata().find("traceparent");
  ASSERT_NE(answered, context.GetServerInitialMetadata().end());
  EXPECT_TRUE(absl::StartsWith({answered->second.data(), answered->second.size()},
                               "00-0af7651916cd43dd8448eb211c80319c-"));
  const auto line = [&]() -> nlohmann::json {
    for (const absl::string_view text : absl::StrSplit(server_->log(), '\n')) {
      const nlohmann::json event = nlohmann::json::parse(text, nullptr, false);
      if (event.is_object() &&
          event.value("method", "") == "awqd.v1.QuantizedInference/QuantizedMatmul") {
        return event;
      }
    }
    return {};
  };
  ASSERT_TRUE(Eventually([&] { return !line().is_null(); })) << server_->log();
  const nlohmann::json call = line();
  EXPECT_EQ(call["message"], "call");
  EXPECT_EQ(call["code"], "OK");
  EXPECT_EQ(call["model"], "m");
  EXPECT_EQ(call["weight"], "layer");
  EXPECT_EQ(call["tokens"], 2);
  EXPECT_EQ(call["requests"], 1);
  EXPECT_EQ(call["trace"], "0af7651916cd43dd8448eb211c80319c");
  EXPECT_GT(call["bytes_in"], 256);
  EXPECT_GE(call["total_us"], call["compute_us"]);
  EXPECT_EQ(server_->Stop().code, 0);
}

TEST_F(ObserveTest, OnlyACallOfOneRequestIsSlow) {
  Start({"--access_log=all", "--slow_call_s=0.000001"});
  ASSERT_TRUE(server_->NewClient()->LoadModel("m").ok());
  for (const int requests : {0, 2}) {
    grpc::ClientContext context;
    const auto stream = stub_->QuantizedMatmulStream(&context);
    v1::QuantizedMatmulResponse answer;
    for (int i = 0; i < requests; ++i) {
      EXPECT_TRUE(stream->Write(Request("m", "layer")));
      EXPECT_TRUE(stream->Read(&answer));
    }
    stream->WritesDone();
    EXPECT_FALSE(stream->Read(&answer));
    EXPECT_TRUE(stream->Finish().ok());
  }
  EXPECT_TRUE(Call().ok());
  EXPECT_EQ(server_->Stop().code, 0);
  EXPECT_EQ(Event("slow call").value("method", ""), "awqd.v1.QuantizedInference/QuantizedMatmul");
  int slow = 0, calls = 0;
  for (const absl::string_view line : absl::StrSplit(server_->log(), '\n')) {
    slow += absl::StrContains(line, "\"slow call\"") ? 1 : 0;
    calls += absl::StrContains(line, "\"call\"") ? 1 : 0;
  }
  EXPECT_EQ(slow, 1) << server_->log();
  EXPECT_GE(calls, 3) << "the load and the streams have lines too";
}

TEST_F(ObserveTest, MetricsAskForTheirRoleWhereThereAreTokens) {
  // Digests of "token-m" and "token-r".
  std::ofstream(repository_ / "tokens")
      << "mia metrics sha256:ab6cc3e7dd7c332d5f9862dcf19bbebd98d16e5792ff2f8de0e625c3019bd331\n"
      << "rita read sha256:818c62b7e9a857d7a81a474c0b025f6b20d3f44bb9c4d7a704ddedfe9ed16652\n";
  server_ = std::make_unique<ServerProcess>(std::vector<std::string>{
      "--model_repository=" + repository_.path(), "--metrics_address=127.0.0.1:0",
      "--log_format=json", "--tokens=" + (repository_ / "tokens")});
  ASSERT_TRUE(server_->WaitServing()) << server_->log();
  const int port = static_cast<int>(Event("metrics")["port"]);
  const auto get = [&](const std::string& path, const std::string& token) {
    return HttpGet(port, path, "GET",
                   token.empty() ? "" : "Authorization: Bearer " + token + "\r\n");
  };
  EXPECT_EQ(get("/livez", "").code, 200);
  EXPECT_EQ(get("/readyz", "").code, 200);
  EXPECT_EQ(get("/metrics", "").code, 401);
  EXPECT_EQ(get("/metrics", "token-x").code, 401);
  EXPECT_EQ(get("/metrics", "token-r").code, 403);
  EXPECT_THAT(get("/metrics", "token-r").body, HasSubstr("needs the role metrics"));
  EXPECT_THAT(get("/metrics", "token-m").body, HasSubstr("awqd_build_info"));
  EXPECT_EQ(get("/", "token-m").code, 200);
  EXPECT_EQ(server_->Stop().code, 0);
}

TEST_F(ObserveTest, ProbesOfALoadBalancerAreNotInTheLog) {
  Start();
  for (int i = 0; i < 10; ++i) {
    const auto serving = server_->NewClient()->IsServing("");
    ASSERT_TRUE(serving.ok() && *serving) << serving.status();
  }
  ASSERT_TRUE(Call().ok());
  EXPECT_EQ(server_->Stop().code, 0);
  EXPECT_THAT(server_->log(), HasSubstr("awqd.v1.QuantizedInference/QuantizedMatmul"));
  EXPECT_THAT(server_->log(), Not(HasSubstr("grpc.health.v1")));
}

TEST_F(ObserveTest, TracesGoToAFile) {
  const std::string file = repository_ / "traces";
  Start({"--trace_file=" + file, "--access_log=off"});
  grpc::ClientContext context;
  context.AddMetadata("traceparent", kTraceparent);
  ASSERT_TRUE(Call("m", "layer", &context).ok());
  ASSERT_TRUE(Call().ok()) << "without a trace: --trace_sample is 0";
  EXPECT_EQ(server_->Stop().code, 0) << server_->log();
  std::ifstream in(file);
  std::vector<std::string> names;
  for (std::string line; std::getline(in, line);) {
    const nlohmann::json span = nlohmann::json::parse(line);
    EXPECT_EQ(span["traceId"], "0af7651916cd43dd8448eb211c80319c");
    names.push_back(span["name"]);
  }
  EXPECT_THAT(names, ::testing::ElementsAre("awqd.v1.QuantizedInference/QuantizedMatmul", "stage",
                                            "queue", "compute", "answer", "send"));
}

TEST_F(ObserveTest, SaysWhatCannotBeWrittenOrListenedOn) {
  for (const char* flag : {"--trace_file=/nonexistent/traces", "--metrics_address=192.0.2.1:1"}) {
    const ExitReport report =
        RunProgram(BinaryPath("awqd"), {"--model_repository=" + repository_.path(), flag,
                                        "--address=127.0.0.1:0", "--device=cpu"});
    EXPECT_EQ(report.code, 1) << report.log;
    EXPECT_THAT(report.log, HasSubstr(std::string(flag).substr(0, std::string(flag).find('='))));
  }
}

}  // namespace
}  // namespace awqd
