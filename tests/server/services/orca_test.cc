// ORCA's reports: their contents, who gets them and when, and when they end.
#include "server/services/orca.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "tests/server/obs/snapshots.h"
#include "tests/server/services/raw_call.h"
#include "tests/server/services/rpc_fixture.h"
#include "xds/service/orca/v3/orca.pb.h"

namespace awqd::services::orca {
namespace {

using ::testing::HasSubstr;
using ::xds::service::orca::v3::OrcaLoadReportRequest;

constexpr char kMethod[] = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics";

// Everything() before any call.
obs::Snapshot Nothing() {
  obs::Snapshot out = obs::Everything();
  for (HistogramData& durations : out.methods[0].durations_ns) {
    durations = obs::Durations({});
  }
  obs::DeviceStats& device = out.devices[0];
  device.batch_tokens = device.batch_requests = Histogram(kCountBounds).data();
  device.compute_ns = device.queue_ns = obs::Durations({});
  return out;
}

TEST(UtilizationTest, RatesAreOfTheTimeBetween) {
  const obs::Snapshot before = Nothing();
  obs::Snapshot now = obs::Everything();
  now.process.cpu = before.process.cpu + absl::Seconds(3);
  // NOT_FOUND is an error of the client; RESOURCE_EXHAUSTED is one of the server.
  now.methods[0].durations_ns[8] = obs::Durations({1000});
  const Report report = ComputeReport(before, now, absl::Seconds(2), 4);
  EXPECT_DOUBLE_EQ(report.cpu_utilization(), 3.0 / (2 * 4));
  EXPECT_DOUBLE_EQ(report.rps_fractional(), 4 / 2.0);
  EXPECT_DOUBLE_EQ(report.eps(), 1 / 2.0);
  EXPECT_DOUBLE_EQ(report.named_metrics().at("tokens_per_s"), 8 / 2.0);
  EXPECT_DOUBLE_EQ(report.named_metrics().at("queue_ms"), 1.0);
  EXPECT_DOUBLE_EQ(report.utilization().at("devices"), 1e-3 / 2);
}

TEST(UtilizationTest, CallsOfOtherServicesAreNoRequests) {
  const obs::Snapshot before = Nothing();
  obs::Snapshot now = obs::Everything();
  now.methods[0].method = "awqd.v1.ServerInfo/GetServerInfo";
  EXPECT_EQ(ComputeReport(before, now, absl::Seconds(1), 1).rps_fractional(), 0);
  now.methods[0].method = "inference.GRPCInferenceService/ModelInfer";
  EXPECT_EQ(ComputeReport(before, now, absl::Seconds(1), 1).rps_fractional(), 3);
}

TEST(UtilizationTest, TheFullestResourceIsTheApplications) {
  obs::Snapshot now = obs::Everything();
  now.queue_limit_requests = 10;
  now.in_flight_limit_bytes = 770;
  now.devices[0].queued_requests = 2;
  obs::DeviceStats& second = now.devices.emplace_back(now.devices[0]);
  second.queued_requests = 4;
  Report report = ComputeReport(now, now, absl::Seconds(1), 1);
  EXPECT_DOUBLE_EQ(report.mem_utilization(), 0.6);
  EXPECT_DOUBLE_EQ(report.utilization().at("queue"), 0.4);
  EXPECT_DOUBLE_EQ(report.utilization().at("in_flight_bytes"), 0.1);
  EXPECT_DOUBLE_EQ(report.application_utilization(), 0.4);
  EXPECT_DOUBLE_EQ(report.named_metrics().at("queued_requests"), 6);
  // A failed device does not count as capacity.
  obs::Snapshot busy = now;
  for (obs::DeviceStats& device : busy.devices) device.compute_ns.sum += 300'000'000;
  EXPECT_DOUBLE_EQ(ComputeReport(now, busy, absl::Seconds(1), 1).application_utilization(), 0.4);
  busy.devices[1].healthy = false;
  EXPECT_DOUBLE_EQ(ComputeReport(now, busy, absl::Seconds(1), 1).application_utilization(), 0.6);
}

// A batch counts when it ends, including the part that was computed before the interval.
TEST(UtilizationTest, NoShareIsBeyondOne) {
  const obs::Snapshot before = obs::Everything();
  obs::Snapshot now = before;
  now.process.cpu += absl::Seconds(100);
  now.devices[0].compute_ns.sum += 50'000'000'000;
  const Report report = ComputeReport(before, now, absl::Seconds(1), 2);
  EXPECT_EQ(report.cpu_utilization(), 1);
  EXPECT_EQ(report.application_utilization(), 1);
  EXPECT_EQ(report.utilization().at("devices"), 1);
  const Report at_once = ComputeReport(before, now, absl::ZeroDuration(), 2);
  EXPECT_EQ(at_once.cpu_utilization(), 0);
  EXPECT_EQ(at_once.rps_fractional(), 0);
}

TEST(UtilizationTest, AllWhoAskWithinASecondShareASnapshot) {
  std::atomic<int> snapshots{0};
  UtilizationStatistics statistics(
      [&] {
        ++snapshots;
        return obs::Everything();
      },
      1);
  std::vector<std::thread> askers;
  for (int i = 0; i < 4; ++i) {
    askers.emplace_back([&] {
      for (const absl::Time end = absl::Now() + absl::Milliseconds(1200); absl::Now() < end;) {
        EXPECT_EQ(statistics.Latest()->report.mem_utilization(), 0.6);
      }
    });
  }
  for (std::thread& asker : askers) asker.join();
  EXPECT_EQ(snapshots, 2);
  EXPECT_EQ(statistics.Latest()->bytes.size(), statistics.Latest()->report.ByteSizeLong());
}

class OrcaTest : public RpcTest {
 protected:
  void Configure(Options* options) override {
    options->orca = true;
    options->transport.max_concurrent_streams = 2 * kMaxOpen;
  }

  static std::string Every(int64_t seconds, int32_t nanos = 0) {
    OrcaLoadReportRequest request;
    request.mutable_report_interval()->set_seconds(seconds);
    request.mutable_report_interval()->set_nanos(nanos);
    return request.SerializeAsString();
  }

  std::unique_ptr<RawStream> Open(const std::string& request) {
    auto stream = std::make_unique<RawStream>(channel_, kMethod);
    EXPECT_TRUE(stream->Write(request) && stream->WritesDone());
    return stream;
  }

  static Report ReadFrom(RawStream* stream) {
    std::string bytes;
    EXPECT_TRUE(stream->Read(&bytes));
    Report report;
    EXPECT_TRUE(report.ParseFromString(bytes));
    return report;
  }

  std::atomic<bool> stop_{false};
};

TEST_F(OrcaTest, AStreamReportsWhatIsAskedOfTheServer) {
  std::thread caller([&] {
    while (!stop_) {
      v1::QuantizedMatmulResponse response;
      EXPECT_TRUE(Matmul(GoodMatmul(), &response).ok());
    }
  });
  const absl::Time start = absl::Now();
  const auto stream = Open(Every(0, 1));
  const Report first = ReadFrom(stream.get());
  EXPECT_GE(absl::Now() - start, kShortest);
  const Report second = ReadFrom(stream.get());
  EXPECT_GE(absl::Now() - start, 2 * kShortest);
  stop_ = true;
  caller.join();
  for (const Report& report : {first, second}) {
    EXPECT_GT(report.rps_fractional(), 1);
    EXPECT_GT(report.cpu_utilization(), 0);
    EXPECT_LE(report.cpu_utilization(), 1);
    EXPECT_EQ(report.eps(), 0);
  }
  stream->Cancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return server_->admission()->drain()->in_flight() == 0; }));
}

TEST_F(OrcaTest, IntervalsThatAreNoneAreRefused) {
  for (const auto& [seconds, nanos, got] : std::vector<std::tuple<int64_t, int32_t, std::string>>{
           {-1, 0, "-1 s and 0 ns"}, {0, -1, "0 s and -1 ns"}, {5, 1'000'000'000, "5 s and 1"}}) {
    const grpc::Status status = RawCall(channel_, kMethod, Every(seconds, nanos));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("report_interval: got " + got));
  }
  EXPECT_EQ(RawCall(channel_, kMethod, "\x0a\xff").error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(OrcaTest, AStreamEndsWithTheServer) {
  // One stream that has sent something, and one that waits for an hour.
  const auto active = Open(""), idle = Open(Every(int64_t{1} << 40));
  ReadFrom(active.get());
  ReadFrom(idle.get());
  const absl::Time start = absl::Now();
  std::thread stop([&] { server_->Shutdown(absl::Seconds(30)); });
  for (RawStream* stream : {active.get(), idle.get()}) {
    for (std::string more; stream->Read(&more);) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  stop.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  server_ = nullptr;
}

TEST_F(OrcaTest, StreamsAreBounded) {
  std::vector<std::unique_ptr<RawStream>> streams;
  for (int i = 0; i < kMaxOpen; ++i) streams.push_back(Open(""));
  ReadFrom(streams.back().get());
  ASSERT_TRUE(Eventually([&] { return server_->admission()->drain()->in_flight() == kMaxOpen; }));
  const grpc::Status status = RawCall(channel_, kMethod, "");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("got one more stream, expected at most 1024"));
  streams.front()->Cancel();
  streams.front()->Finish();
  ASSERT_TRUE(
      Eventually([&] { return server_->admission()->drain()->in_flight() == kMaxOpen - 1; }));
  ReadFrom(Open("").get());
}

TEST_F(RpcTest, NothingIsReportedUnlessAskedFor) {
  EXPECT_EQ(RawCall(channel_, kMethod, "").error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace awqd::services::orca
