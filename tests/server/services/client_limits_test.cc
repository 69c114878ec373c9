// Limits of one client in a whole server, and the errors beyond them.
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "tests/server/services/raw_call.h"
#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {
namespace {

using ::testing::HasSubstr;

// The delay in a refusal; nullopt without one.
std::optional<double> RetrySeconds(const grpc::Status& status) {
  google::rpc::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  for (const auto& detail : details.details()) {
    google::rpc::RetryInfo retry;
    if (!detail.UnpackTo(&retry)) continue;
    return static_cast<double>(retry.retry_delay().seconds()) + 1e-9 * retry.retry_delay().nanos();
  }
  return std::nullopt;
}

class OneAtATimeTest : public RpcTest {
 protected:
  void Configure(Options* options) override { options->transport.client.requests_in_flight = 1; }
};

TEST_F(OneAtATimeTest, TheSecondRequestIsToldToComeBack) {
  RawStream stream(channel_, "/awqd.v1.QuantizedInference/QuantizedMatmulStream");
  ASSERT_TRUE(Eventually([&] { return server_->admission()->drain()->in_flight() == 1; }));
  const grpc::Status refused = RawCall(channel_, "/awqd.v1.ServerInfo/GetServerInfo", "");
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("max_requests_in_flight_per_client"));
  EXPECT_THAT(refused.error_message(), HasSubstr("ipv4:127.0.0.1: "));
  ASSERT_TRUE(RetrySeconds(refused).has_value());
  EXPECT_GT(*RetrySeconds(refused), 0);
  EXPECT_TRUE(RawCall(channel_, "/grpc.health.v1.Health/Check", "").ok())
      << "health is not bounded";
  EXPECT_TRUE(stream.WritesDone());
  EXPECT_TRUE(stream.Finish().ok());
  EXPECT_TRUE(
      Eventually([&] { return RawCall(channel_, "/awqd.v1.ServerInfo/GetServerInfo", "").ok(); }));
}

TEST_F(OneAtATimeTest, MessagesOfAStreamCountBesideIt) {
  RawStream stream(channel_, "/awqd.v1.QuantizedInference/QuantizedMatmulStream");
  ASSERT_TRUE(stream.Write(""));
  std::string answer;
  ASSERT_TRUE(stream.Read(&answer));
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(response.ParseFromString(answer));
  EXPECT_EQ(response.error().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(response.error().message(), HasSubstr("max_requests_in_flight_per_client"));
  ASSERT_TRUE(stream.WritesDone());
  EXPECT_TRUE(stream.Finish().ok()) << "the stream stays open";
}

class RateTest : public RpcTest {
 protected:
  // Slow enough that the second request comes too soon on any machine.
  void Configure(Options* options) override { options->transport.client.requests_per_second = 0.5; }
};

TEST_F(RateTest, TellsWhenToComeBack) {
  int answered = 0;
  grpc::Status last;
  for (int i = 0; i < 50 && last.ok(); ++i) {
    last = RawCall(channel_, "/awqd.v1.ServerInfo/GetServerInfo", "");
    answered += last.ok();
  }
  EXPECT_GE(answered, 1);
  EXPECT_EQ(last.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(last.error_message(), HasSubstr("more than 0.5 requests a second"));
  ASSERT_TRUE(RetrySeconds(last).has_value());
  EXPECT_GT(*RetrySeconds(last), 0);
  EXPECT_LE(*RetrySeconds(last), 2);
}

class ClientBytesTest : public RpcTest {
 protected:
  void Configure(Options* options) override { options->transport.client.bytes_in_flight = 1000; }
};

TEST_F(ClientBytesTest, BoundsRequestsAndGivesBack) {
  const std::string method = "/awqd.v1.QuantizedInference/QuantizedMatmul";
  for (int i = 0; i < 5; ++i) {
    const grpc::Status refused = RawCall(channel_, method, std::string(1001, '\0'));
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(refused.error_message(), HasSubstr("max_bytes_in_flight_per_client, 1000"));
    EXPECT_TRUE(RetrySeconds(refused).has_value());
    EXPECT_EQ(RawCall(channel_, method, std::string(600, '\0')).error_code(),
              grpc::StatusCode::INVALID_ARGUMENT)
        << "it was parsed";
  }
  EXPECT_EQ(server_->in_flight_bytes(), 0);
}

}  // namespace
}  // namespace awqd::services
