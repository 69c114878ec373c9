// The real server for operators: metrics, access log, traces.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/base/unique_fd.h"
#include "tests/e2e/json_lines.h"
#include "tests/e2e/server_test.h"
#include "tests/server/obs/http_get.h"
#include "tests/server/raw_call.h"
#include "xds/data/orca/v3/orca_load_report.pb.h"

namespace awqd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::HttpGet;
using ::testing::Not;

constexpr char kTraceparent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

class ObserveTest : public ServerTest {
 protected:
  ObserveTest() { SyntheticAwq::Random(64, 16, 32, 1).Write(repository_ / "m"); }

  void StartObserved(std::vector<std::string> args = {}) {
    args.insert(args.end(), {"--metrics_address=127.0.0.1:0", "--log_format=json"});
    Start(std::move(args));
    metrics_port_ = MetricsPort();
  }
  // The log may lag behind.
  int MetricsPort() const {
    EXPECT_TRUE(Eventually([&] { return !Event(IsMessage("metrics")).is_null(); }));
    return static_cast<int>(Event(IsMessage("metrics"))["port"]);
  }

  // The first line of the log that is so; null without one.
  nlohmann::json Event(const std::function<bool(const nlohmann::json&)>& is_so) const {
    for (nlohmann::json& event : JsonLines(server_->log())) {
      if (is_so(event)) return std::move(event);
    }
    return {};
  }

  static v1::QuantizedMatmulRequest Request(const std::string& model, const std::string& weight) {
    v1::QuantizedMatmulRequest request = ProductOfZeros(2, 64);
    request.mutable_weight()->set_model(model);
    request.mutable_weight()->set_weight(weight);
    return request;
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

  std::string Metrics() const { return HttpGet(metrics_port_, "/metrics").body; }
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

  int metrics_port_ = 0;
};

TEST_F(ObserveTest, OrcaReportsTellOfTheLoad) {
  StartObserved({"--orca"});
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop) EXPECT_TRUE(Call().ok());
  });
  RawStream reports(server_->NewChannel(), "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics");
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
  Stop();
  EXPECT_EQ(reports.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

// gRPC's clients hide this metadata, so it is read from the wire.
TEST_F(ObserveTest, ACallForAResultEndsWithAnOrcaReport) {
  const auto end_of_call = [this] {
    const std::string request = Request("m", "layer").SerializeAsString();
    Socket socket(port_);
    socket.Send(
        Hello() + Frame(kHeaders, kEndHeaders, 1, CallHeaders()) +
        Frame(kData, kEndStream, 1, Message(static_cast<uint32_t>(request.size()), request)));
    bool closed = false;
    return PayloadsOf(kHeaders, socket.Receive(1000, &closed));
  };
  constexpr char kReport[] = "endpoint-load-metrics-bin";
  StartObserved({"--orca"});
  EXPECT_THAT(end_of_call(), AllOf(HasSubstr(kReport), HasSubstr("grpc-status")));
  Stop();
  StartObserved();
  EXPECT_THAT(end_of_call(), AllOf(Not(HasSubstr(kReport)), HasSubstr("grpc-status")));
}

TEST_F(ObserveTest, MetricsCountWhatHappened) {
  StartObserved();
  EXPECT_EQ(HttpGet(metrics_port_, "/livez").code, 200);
  EXPECT_EQ(HttpGet(metrics_port_, "/readyz").code, 200);
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

  ASSERT_FALSE(client_->LoadModel("absent").ok());
  EXPECT_EQ(Value("awqd_model_load_duration_seconds_count{outcome=\"failed\"}"), 1);
  const auto info = client_->GetServerInfo();
  ASSERT_TRUE(info.ok());
  ASSERT_EQ(info->counters().models_size(), 1);
  EXPECT_EQ(info->counters().models(0).tokens(), 6);
  EXPECT_EQ(info->counters().devices(0).requests(), 3);
  EXPECT_EQ(info->counters().failed_calls(), 2);

  ASSERT_TRUE(client_->LoadModel("m").ok());
  EXPECT_EQ(Value("awqd_model_requests_total{model=\"m\"}"), 3) << "a reload starts no new series";
  ASSERT_TRUE(client_->UnloadModel("m").ok());
  EXPECT_THAT(Metrics(), Not(HasSubstr("model=\"m\""))) << "it is not served any more";
  Stop();
}

TEST_F(ObserveTest, ModelsThatFailedAtStartAreShown) {
  SyntheticAwq::Random(64, 16, 32, 1).Write(repository_ / "broken");
  std::ofstream(repository_ / "broken/config.json") << "{";
  StartObserved({"--keep_going"});
  EXPECT_EQ(HttpGet(metrics_port_, "/readyz").code, 200) << "the other model is served";
  EXPECT_EQ(Value("awqd_ready"), 0);
  EXPECT_EQ(Value("awqd_models{state=\"failed\"}"), 1);
  EXPECT_EQ(Value("awqd_models{state=\"ready\"}"), 1);
  EXPECT_THAT(Metrics(), Not(HasSubstr("model=\"broken\"")));
  const auto models = nlohmann::json::parse(HttpGet(metrics_port_, "/api/status").body)["models"];
  ASSERT_EQ(models.size(), 2u);
  EXPECT_EQ(models[0]["name"], "broken");
  EXPECT_EQ(models[0]["state"], "failed");
  EXPECT_THAT(std::string(models[0]["message"]), HasSubstr("config.json"));

  SyntheticAwq::Random(64, 16, 32, 1).Write(repository_ / "broken");
  ASSERT_TRUE(client_->LoadModel("broken").ok());
  EXPECT_EQ(Value("awqd_ready"), 1);
  EXPECT_EQ(Value("awqd_models{state=\"failed\"}"), 0);
  ASSERT_TRUE(client_->UnloadModel("broken").ok());
  EXPECT_EQ(Value("awqd_ready"), 1) << "somebody wanted that";
  EXPECT_EQ(Value("awqd_models{state=\"unloaded\"}"), 1);
  Stop();
}

TEST_F(ObserveTest, PromtoolFindsNothing) {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0) GTEST_SKIP() << "no promtool";
  StartObserved();
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
  StartObserved({"--access_log=all"});
  grpc::ClientContext context;
  context.AddMetadata("traceparent", kTraceparent);
  ASSERT_TRUE(Call("m", "layer", &context).ok());
  const auto answered = context.GetServerInitialMetadata().find("traceparent");
  ASSERT_NE(answered, context.GetServerInitialMetadata().end());
  EXPECT_TRUE(absl::StartsWith({answered->second.data(), answered->second.size()},
                               "00-0af7651916cd43dd8448eb211c80319c-"));
  nlohmann::json call;
  ASSERT_TRUE(Eventually([&] {
    call = Event([](const nlohmann::json& event) {
      return event.value("method", "") == "awqd.v1.QuantizedInference/QuantizedMatmul";
    });
    return !call.is_null();
  })) << server_->log();
  EXPECT_EQ(call["message"], "call");
  EXPECT_EQ(call["code"], "OK");
  EXPECT_EQ(call["model"], "m");
  EXPECT_EQ(call["weight"], "layer");
  EXPECT_EQ(call["tokens"], 2);
  EXPECT_EQ(call["requests"], 1);
  EXPECT_EQ(call["trace"], "0af7651916cd43dd8448eb211c80319c");
  EXPECT_GT(call["bytes_in"], 256);
  EXPECT_GE(call["total_us"], call["compute_us"]);
  Stop();
}

TEST_F(ObserveTest, OnlyACallOfOneRequestIsSlow) {
  StartObserved({"--access_log=all", "--slow_call_s=0.000001"});
  ASSERT_TRUE(client_->LoadModel("m").ok());
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
  Stop();
  EXPECT_EQ(Event(IsMessage("slow call")).value("method", ""),
            "awqd.v1.QuantizedInference/QuantizedMatmul");
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
  StartObserved({"--tokens=" + (repository_ / "tokens")});
  const auto get = [&](const std::string& path, const std::string& token) {
    return HttpGet(metrics_port_, path, "GET",
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
  Stop();
}

TEST_F(ObserveTest, ProbesOfALoadBalancerAreNotInTheLog) {
  StartObserved();
  for (int i = 0; i < 10; ++i) {
    const auto serving = server_->NewClient()->IsServing("");
    ASSERT_TRUE(serving.ok() && *serving) << serving.status();
  }
  ASSERT_TRUE(Call().ok());
  Stop();
  EXPECT_THAT(server_->log(), HasSubstr("awqd.v1.QuantizedInference/QuantizedMatmul"));
  EXPECT_THAT(server_->log(), Not(HasSubstr("grpc.health.v1")));
}

TEST_F(ObserveTest, TracesGoToAFile) {
  const std::string file = repository_ / "traces";
  StartObserved({"--trace_file=" + file, "--access_log=off"});
  grpc::ClientContext context;
  context.AddMetadata("traceparent", kTraceparent);
  ASSERT_TRUE(Call("m", "layer", &context).ok());
  ASSERT_TRUE(Call().ok()) << "without a trace: --trace_sample is 0";
  Stop();
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

TEST_F(ObserveTest, MetricsHaveSeveralAddressesAndBothFamilies) {
  const std::string socket = repository_ / "m.sock";
  Start({"--metrics_address=0.0.0.0:0,unix:" + socket, "--log_format=json"});
  const int port = MetricsPort();
  EXPECT_EQ(HttpGet(port, "/livez").code, 200);
  const UniqueFd v6(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_port = htons(static_cast<uint16_t>(port))};
  address.sin6_addr = in6addr_loopback;
  if (v6.ok() &&
      connect(v6.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    EXPECT_EQ(errno, EADDRNOTAVAIL) << "this machine has no IPv6, or else: " << strerror(errno);
  }
  const UniqueFd path(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un name = {.sun_family = AF_UNIX};
  socket.copy(name.sun_path, sizeof(name.sun_path) - 1);
  ASSERT_EQ(connect(path.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  const std::string request = "GET /readyz HTTP/1.0\r\n\r\n";
  ASSERT_EQ(write(path.get(), request.data(), request.size()), ssize_t(request.size()));
  char answer[16] = "";
  ASSERT_GT(read(path.get(), answer, sizeof(answer) - 1), 12);
  EXPECT_THAT(std::string(answer), HasSubstr(" 200 "));
  Stop();
  EXPECT_NE(access(socket.c_str(), F_OK), 0) << "the socket file stays behind";
}

TEST_F(ObserveTest, ATakenMetricsAddressIsSaidBeforeAnythingListens) {
  StartObserved();
  const ExitReport report =
      RunProgram(BinaryPath("awqd"),
                 {"--model_repository=" + repository_.path(), "--address=127.0.0.1:0",
                  "--device=cpu", absl::StrCat("--metrics_address=127.0.0.1:", metrics_port_)});
  EXPECT_EQ(report.code, 1) << report.log;
  EXPECT_THAT(report.log, HasSubstr(absl::StrCat("--metrics_address: cannot listen on \"127.0.0.1:",
                                                 metrics_port_, "\": Address already in use")));
  EXPECT_THAT(report.log, Not(HasSubstr("listening on")));
}

TEST_F(ObserveTest, LargeHeadersAreRefusedAndLogged) {
  const auto call = [this](size_t bytes) {
    grpc::ClientContext context;
    context.AddMetadata("baggage", std::string(bytes, 'b'));
    return Call("m", "layer", &context).error_code();
  };
  Start();
  EXPECT_EQ(call(10'000), grpc::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Eventually([&] {
    return absl::StrContains(server_->log(), "headers larger than max_metadata_bytes bytes=1");
  })) << server_->log();
  Stop();
  Start({"--max_metadata_bytes=16384"});
  EXPECT_EQ(call(10'000), grpc::OK);
  Stop();
}

TEST_F(ObserveTest, SaysWhatCannotBeWrittenOrListenedOn) {
  for (const char* flag : {"--trace_file=/nonexistent/traces", "--metrics_address=192.0.2.1:1"}) {
    const ExitReport report =
        RunProgram(BinaryPath("awqd"), {"--model_repository=" + repository_.path(), flag,
                                        "--keep_going", "--address=127.0.0.1:0", "--device=cpu"});
    EXPECT_EQ(report.code, 1) << report.log;
    EXPECT_THAT(report.log, HasSubstr(std::string(flag).substr(0, std::string(flag).find('='))));
  }
}

}  // namespace
}  // namespace awqd
