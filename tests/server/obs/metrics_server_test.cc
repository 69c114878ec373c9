// The HTTP paths for operators: metrics, probes, the page and its data.
#include "server/obs/metrics_server.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/obs/http_server.h"
#include "server/obs/snapshot.h"
#include "tests/server/obs/http_get.h"
#include "tests/server/obs/snapshots.h"

namespace awqd::obs {
namespace {

using ::testing::HasSubstr;
using testing::HttpGet;
using ::testing::Not;

// The value of `series` in the exposition; "absent" without one.
std::string ValueOf(const std::string& text, const std::string& series) {
  const size_t at = text.find("\n" + series + " ");
  if (at == std::string::npos) return "absent";
  const size_t begin = at + series.size() + 2;
  return text.substr(begin, text.find('\n', begin) - begin);
}

TEST(Exposition, AMethodHasSeriesFromItsFirstCallOn) {
  Snapshot snapshot = Everything();
  snapshot.methods.push_back(snapshot.methods.front());
  snapshot.methods.back().method = "a.Service/NeverCalled";
  snapshot.methods.back().started = 0;
  EXPECT_THAT(PrometheusText(snapshot), Not(HasSubstr("NeverCalled")));
  snapshot.methods.back().started = 1;
  EXPECT_THAT(PrometheusText(snapshot),
              HasSubstr("grpc_server_call_started_total{grpc_method=\"a.Service/NeverCalled\"} 1"));
}

// 600 microseconds are 0.0006000000000000001 s in floating point.
TEST(Exposition, BoundsAreAsTyped) {
  const std::string text = PrometheusText(Everything());
  for (const char* bound : {"1e-05", "0.0003", "0.0006", "0.02", "1", "4294967296", "+Inf"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("le=\"", bound, "\"}")));
  }
  EXPECT_THAT(text, ::testing::Not(::testing::ContainsRegex("le=\"[0-9.]{12}")));
}

TEST(Exposition, ShowsConnectionsAndTheCertificate) {
  Snapshot snapshot = Everything();
  EXPECT_THAT(PrometheusText(snapshot), Not(HasSubstr("awqd_tls_certificate")));
  snapshot.refused_connections = {{"plaintext", 3}};
  snapshot.leases = {.leases = {3, {.model = "m"}}, .refused = 1};
  snapshot.rings = {.rings = 2, .prepared_calls = 1, .broken = 4};
  snapshot.certificate_expiry = absl::FromUnixSeconds(1'900'000'000);
  const std::string text = PrometheusText(snapshot);
  EXPECT_EQ(ValueOf(text, "awqd_connections_refused_total{reason=\"plaintext\"}"), "3");
  EXPECT_EQ(ValueOf(text, "awqd_leases{model=\"m\"}"), "3");
  EXPECT_EQ(ValueOf(text, "awqd_leases_refused_total"), "1");
  EXPECT_EQ(ValueOf(text, "awqd_rings"), "2");
  EXPECT_EQ(ValueOf(text, "awqd_rings_refused_total{reason=\"broken\"}"), "4");
  EXPECT_EQ(ValueOf(text, "awqd_tls_certificate_expiry_timestamp_seconds"), "1900000000");
}

TEST(Exposition, LeasesInTheStatus) {
  Snapshot snapshot = Everything();
  EXPECT_FALSE(nlohmann::json::parse(StatusJson(snapshot, {})).contains("leases"));
  snapshot.leases = LeaseStats();
  EXPECT_EQ(nlohmann::json::parse(StatusJson(snapshot, {}))["leases"], nlohmann::json::array());
  snapshot.leases->leases = {{.model = "m",
                              .device = "cpu",
                              .version = 2,
                              .bytes = 4096,
                              .client = "ana, user 7, process 8",
                              .since = snapshot.time - absl::Seconds(90)}};
  EXPECT_EQ(nlohmann::json::parse(StatusJson(snapshot, {}))["leases"],
            nlohmann::json::parse(R"([{"model": "m", "device": "cpu", "version": 2, "bytes": 4096,
                                       "client": "ana, user 7, process 8", "age_s": 90.0}])"));
}

TEST(Exposition, HasEverythingInBaseUnits) {
  const std::string text = PrometheusText(Everything());
  const std::string method = "grpc_method=\"awqd.v1.QuantizedInference/QuantizedMatmul\"";
  const std::string ok = absl::StrCat("{", method, ",grpc_status=\"OK\"");
  const std::pair<std::string, std::string> expected[] = {
      {absl::StrCat("grpc_server_call_started_total{", method, "}"), "4"},
      {absl::StrCat("awqd_calls_active{", method, "}"), "1"},
      {absl::StrCat("grpc_server_call_duration_seconds_count", ok, "}"), "2"},
      {absl::StrCat("grpc_server_call_duration_seconds_bucket", ok, ",le=\"0.0003\"}"), "1"},
      {absl::StrCat("grpc_server_call_duration_seconds_bucket", ok, ",le=\"+Inf\"}"), "2"},
      {absl::StrCat("grpc_server_call_duration_seconds_count{", method,
                    ",grpc_status=\"NOT_FOUND\"}"),
       "1"},
      {absl::StrCat("grpc_server_call_rcvd_total_compressed_message_size_bytes_sum{", method, "}"),
       "2000"},
      {"awqd_queue_duration_seconds_sum{device=\"cpu:0\"}", "0.001"},
      {"awqd_batch_tokens_sum{device=\"cpu:0\"}", "8"},
      {"awqd_kernel_batches_total{device=\"cpu:0\",kernel=\"cpu/qmatmul_a16\"}", "7"},
      {"awqd_kernel_compute_seconds_total{device=\"cpu:0\",kernel=\"cpu/qmatmul_a16\"}", "2"},
      {"awqd_refused_requests_total{reason=\"queue_full\"}", "3"},
      {"awqd_refused_requests_total{reason=\"in_flight_bytes\"}", "2"},
      {"awqd_in_flight_bytes", "77"},
      {"awqd_model_tokens_total{model=\"m\"}", "9"},
      {"awqd_model_weights_bytes{model=\"m\",device=\"cpu:0\"}", "600"},
      {"awqd_model_unserved_weights{model=\"m\"}", "3"},
      {"awqd_model_load_duration_seconds_sum{outcome=\"ok\"}", "2"},
      {"awqd_device_memory_free_bytes{device=\"cpu:0\"}", "400"},
      {"awqd_device_faulted{device=\"cpu:0\"}", "0"},
      {"awqd_models{state=\"ready\"}", "1"},
      {"awqd_models{state=\"loading\"}", "0"},
      {"awqd_models{state=\"failed\"}", "1"},
      {"awqd_models{state=\"unloaded\"}", "2"},
      {"awqd_ready", "1"},
      {"awqd_trace_spans_total{outcome=\"dropped\"}", "6"},
      {"awqd_build_info{version=\"1.2.3\"}", "1"}};
  for (const auto& [series, value] : expected) EXPECT_EQ(ValueOf(text, series), value) << series;
  EXPECT_THAT(text, Not(HasSubstr("UNAVAILABLE"))) << "a code that no call ended with";
}

TEST(Exposition, IsNotReadyWithoutAModelOfTheStart) {
  Snapshot snapshot = Everything();
  snapshot.start_models_failed = true;
  EXPECT_EQ(ValueOf(PrometheusText(snapshot), "awqd_ready"), "0");
  snapshot.start_models_failed = false;
  EXPECT_EQ(ValueOf(PrometheusText(snapshot), "awqd_ready"), "1");
  snapshot.serving = false;
  EXPECT_EQ(ValueOf(PrometheusText(snapshot), "awqd_ready"), "0");
}

TEST(Exposition, AQuantileOfFewCallsIsABound) {
  const auto estimate = [](int calls, int64_t ns, double q) {
    Histogram histogram(kLatencyBounds);
    for (int i = 0; i < calls; ++i) histogram.Observe(ns);
    return EstimateQuantile(histogram.data(), q);
  };
  EXPECT_TRUE(std::isnan(estimate(0, 0, 0.5).ms));
  EXPECT_EQ(estimate(9, 1'200'000, 0.5).sign, "≤");
  EXPECT_DOUBLE_EQ(estimate(9, 1'200'000, 0.5).ms, 2);
  EXPECT_EQ(estimate(10, 1'200'000, 0.5).sign, "");
  EXPECT_DOUBLE_EQ(estimate(10, 1'200'000, 0.5).ms, 1.5);
  EXPECT_EQ(estimate(499, 1'200'000, 0.99).sign, "≤");
  EXPECT_EQ(estimate(500, 1'200'000, 0.99).sign, "");
  EXPECT_EQ(estimate(1000, 60'000'000'000, 0.99).sign, ">");
  EXPECT_DOUBLE_EQ(estimate(1000, 60'000'000'000, 0.99).ms, 50'000);
  const nlohmann::json status = nlohmann::json::parse(StatusJson(Everything(), {{}}));
  EXPECT_EQ(status["methods"][0]["p99"]["sign"], "≤");
  EXPECT_EQ(status["methods"][0]["p99"]["ms"], 5);
  EXPECT_TRUE(status["history"][0]["p99"]["ms"].is_null()) << "there was no call";
}

TEST(Exposition, PromtoolFindsNothing) {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0) GTEST_SKIP() << "no promtool";
  const std::string path = absl::StrCat(::testing::TempDir(), "/awqd_metrics_", ::getpid());
  std::ofstream(path) << PrometheusText(Everything());
  const std::string command =
      absl::StrCat("promtool check metrics <", path, " >", path, ".out 2>&1");
  const int code = std::system(command.c_str());
  std::ifstream out(path + ".out");
  EXPECT_EQ(code, 0) << std::string(std::istreambuf_iterator<char>(out), {});
  EXPECT_EQ(std::ifstream(path + ".out").peek(), EOF) << "it warns of something";
  std::remove(path.c_str());
  std::remove((path + ".out").c_str());
}

TEST(TimeSeries, HoldsRatesOfTheLastQuarterOfAnHour) {
  TimeSeries series;
  Snapshot snapshot = Everything();
  series.AddSnapshot(snapshot);
  EXPECT_TRUE(series.points().empty());
  Histogram counts(kCountBounds), tokens(kCountBounds);
  for (int i = 0; i < 10; ++i) counts.Observe(2);
  for (int i = 0; i < 10; ++i) tokens.Observe(6);
  snapshot.devices[0].batch_requests.Merge(counts.data());
  snapshot.devices[0].batch_tokens.Merge(tokens.data());
  snapshot.methods[0].durations_ns[0].Merge(Durations({900'000, 900'000, 900'000, 900'000}));
  snapshot.methods[0].durations_ns[5].Merge(Durations({900'000}));
  snapshot.time += absl::Seconds(5);
  series.AddSnapshot(snapshot);
  ASSERT_EQ(series.points().size(), 1u);
  const TimeSeriesPoint point = series.points()[0];
  EXPECT_DOUBLE_EQ(point.requests_per_s, 4);
  EXPECT_DOUBLE_EQ(point.tokens_per_s, 12);
  EXPECT_DOUBLE_EQ(point.failed_per_s, 0.2);
  EXPECT_DOUBLE_EQ(point.batch_tokens, 6);
  EXPECT_GT(point.p99.ms, 0.6);
  EXPECT_LE(point.p99.ms, 1);
  EXPECT_DOUBLE_EQ(point.device_bytes, 300) << "what this server holds, not all that is in use";
  for (int i = 0; i < 400; ++i) {
    snapshot.time += TimeSeries::kInterval;
    series.AddSnapshot(snapshot);
  }
  EXPECT_TRUE(std::isnan(series.points().back().batch_tokens)) << "there was no batch";
  EXPECT_LE(series.points().size(), 181u);
  EXPECT_GE(series.points().size(), 180u);
}

TEST(TimeSeries, StreamsAndProbesDoNotCountAsLatency) {
  Snapshot snapshot = Everything();
  EXPECT_EQ(RequestDurations(snapshot).total(), 3);
  snapshot.methods[0].method = "awqd.v1.QuantizedInference/QuantizedMatmulStream";
  EXPECT_EQ(RequestDurations(snapshot).total(), 0);
  snapshot.methods[0].method = "grpc.health.v1.Health/Check";
  EXPECT_EQ(RequestDurations(snapshot).total(), 0);
}

class MetricsServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = MetricsServer::Start(testing::ListenOnLoopback(), [this](bool plans) {
      Snapshot out = Everything();
      out.serving = serving_;
      out.devices[0].healthy = healthy_;
      if (!plans) out.models[0].kernels.clear();
      return out;
    });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  testing::HttpPage Get(const std::string& path) { return HttpGet(server_->port(), path); }

  std::atomic<bool> serving_{true}, healthy_{true};
  std::unique_ptr<MetricsServer> server_;
};

TEST(MetricsServer, AsksForWhatTheGuardWantsButNotOfProbes) {
  const auto guard = [](const std::vector<std::string>& shown) -> absl::Status {
    if (shown.size() != 1) return absl::UnauthenticatedError("expected a token");
    return shown[0] == "Bearer good" ? absl::OkStatus() : absl::PermissionDeniedError("a role");
  };
  const auto server = MetricsServer::Start(
      testing::ListenOnLoopback(), [](bool) { return Everything(); }, guard);
  ASSERT_TRUE(server.ok()) << server.status();
  const auto code = [&](const std::string& path, const std::string& headers) {
    return testing::HttpGet((*server)->port(), path, "GET", headers).code;
  };
  for (const char* path : {"/metrics", "/api/status", "/", "/page.js", "/page.css", "/nowhere"}) {
    EXPECT_EQ(code(path, ""), 401) << path;
    EXPECT_EQ(code(path, "Authorization: Bearer bad\r\n"), 403) << path;
    // The encoding of "anybody:good", as a browser sends it.
    EXPECT_EQ(code(path, "Authorization: Basic YW55Ym9keTpnb29k\r\n"),
              code(path, "Authorization: Bearer good\r\n"));
    EXPECT_EQ(code(path, "Authorization: Basic !\r\n"), 403) << path;
  }
  EXPECT_EQ(code("/metrics", "Authorization: Bearer good\r\n"), 200);
  EXPECT_EQ(code("/", "Authorization: Bearer good\r\n"), 200);
  EXPECT_NE(code("/livez", ""), 401);
  EXPECT_NE(code("/readyz", ""), 401);
}

TEST_F(MetricsServerTest, AnswersProbes) {
  EXPECT_EQ(Get("/livez").code, 200);
  EXPECT_EQ(Get("/readyz").code, 200);
  serving_ = false;
  EXPECT_EQ(Get("/readyz").code, 503);
  EXPECT_EQ(Get("/livez").code, 200);
  serving_ = true;
  healthy_ = false;
  EXPECT_EQ(Get("/readyz").code, 503);
  EXPECT_THAT(Get("/readyz").body, HasSubstr("cpu:0"));
}

TEST_F(MetricsServerTest, ServesMetrics) {
  const testing::HttpPage page = Get("/metrics");
  EXPECT_EQ(page.code, 200);
  EXPECT_THAT(page.head, HasSubstr("text/plain; version=0.0.4"));
  EXPECT_THAT(page.body, HasSubstr("awqd_build_info{version=\"1.2.3\"} 1\n"));
}

TEST_F(MetricsServerTest, ServesThePageAndNothingFromElsewhere) {
  const testing::HttpPage page = Get("/");
  EXPECT_EQ(page.code, 200);
  EXPECT_THAT(page.head, HasSubstr("text/html"));
  EXPECT_THAT(page.head, HasSubstr("default-src 'self'"));
  EXPECT_THAT(page.body, HasSubstr("href=\"/favicon.ico\""));
  EXPECT_THAT(Get("/favicon.ico").head, HasSubstr("image/svg+xml"));
  for (const char* file : {"/", "/page.js", "/page.css", "/favicon.ico"}) {
    EXPECT_EQ(Get(file).code, 200) << file;
    for (const char* elsewhere : {"https://", "src=\"//", "@import", "url("}) {
      EXPECT_THAT(Get(file).body, Not(HasSubstr(elsewhere))) << file;
    }
  }
  const nlohmann::json status = nlohmann::json::parse(Get("/api/status").body);
  EXPECT_EQ(status["models"][0]["state"], "failed") << "what needs a person comes first";
  EXPECT_EQ(status["models"][0]["message"], "no config.json");
  EXPECT_EQ(status["models"][1]["kernels"].size(), 2u);
  EXPECT_EQ(status["models"][1]["bytes"]["cpu:0"], 600);
  EXPECT_EQ(status["devices"][0]["name"], "a \"quoted\" name");
  EXPECT_EQ(status["methods"][0]["codes"]["NOT_FOUND"], 1);
  EXPECT_TRUE(status["history"].is_array());
}

TEST_F(MetricsServerTest, ReadsOnly) {
  for (const char* method : {"POST", "PUT", "DELETE"}) {
    EXPECT_EQ(HttpGet(server_->port(), "/metrics", method).code, 405) << method;
  }
  const testing::HttpPage head = HttpGet(server_->port(), "/livez", "HEAD");
  EXPECT_EQ(head.code, 200);
  EXPECT_EQ(head.body, "");
  for (const char* path : {"/nope", "/page.html", "/../etc/passwd", "/%2e%2e/etc/passwd"}) {
    EXPECT_NE(Get(path).code, 200) << path;
  }
}

TEST_F(MetricsServerTest, EndsSoon) {
  ASSERT_EQ(Get("/livez").code, 200);
  const absl::Time begin = absl::Now();
  server_.reset();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
}

}  // namespace
}  // namespace awqd::obs
