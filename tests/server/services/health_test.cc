// Health: every transition, by Check and by Watch.
#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {
namespace {

using ::grpc::health::v1::Health;
using ::grpc::health::v1::HealthCheckRequest;
using ::grpc::health::v1::HealthCheckResponse;

class HealthTest : public RpcTest {
 protected:
  void SetUp() override {
    RpcTest::SetUp();
    health_ = Health::NewStub(channel_);
  }

  grpc::Status Check(const std::string& service, HealthCheckResponse* response) {
    grpc::ClientContext context;
    Deadline(&context);
    HealthCheckRequest request;
    request.set_service(service);
    return health_->Check(&context, request, response);
  }

  HealthCheckResponse::ServingStatus StatusOf(const std::string& service) {
    HealthCheckResponse response;
    EXPECT_TRUE(Check(service, &response).ok());
    return response.status();
  }

  std::unique_ptr<Health::Stub> health_;
};

const char* const kServices[] = {"", "awqd.v1.QuantizedInference", "awqd.v1.ModelRepository",
                                 "awqd.v1.ServerInfo", "inference.GRPCInferenceService"};

TEST_F(HealthTest, EveryServiceServesOnlyWhenReady) {
  for (const char* service : kServices) {
    EXPECT_EQ(StatusOf(service), HealthCheckResponse::NOT_SERVING) << service;
  }
  server_->SetServing(true);
  for (const char* service : kServices) {
    EXPECT_EQ(StatusOf(service), HealthCheckResponse::SERVING) << service;
  }
  server_->SetServing(false);
  for (const char* service : kServices) {
    EXPECT_EQ(StatusOf(service), HealthCheckResponse::NOT_SERVING) << service;
  }
}

TEST_F(HealthTest, CheckDoesNotKnowOtherServices) {
  HealthCheckResponse response;
  EXPECT_EQ(Check("awqd.v1.Nope", &response).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(Check(std::string(256, 'x'), &response).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(HealthTest, NamesOfServicesAreShort) {
  HealthCheckRequest request;
  HealthCheckResponse response;
  for (const auto& [bytes, code, message] :
       std::vector<std::tuple<int, grpc::StatusCode, std::string>>{
           {257, grpc::StatusCode::INVALID_ARGUMENT,
            "service: got 257 bytes, expected at most 256"},
           {100000, grpc::StatusCode::RESOURCE_EXHAUSTED, "request: got 100004 bytes"}}) {
    request.set_service(std::string(bytes, 'x'));
    const grpc::Status checked = Check(request.service(), &response);
    EXPECT_EQ(checked.error_code(), code);
    EXPECT_THAT(checked.error_message(), ::testing::HasSubstr(message));
    grpc::ClientContext context;
    Deadline(&context);
    const auto reader = health_->Watch(&context, request);
    EXPECT_FALSE(reader->Read(&response));
    const grpc::Status watched = reader->Finish();
    EXPECT_EQ(watched.error_code(), code);
    EXPECT_THAT(watched.error_message(), ::testing::HasSubstr(message));
  }
}

TEST_F(HealthTest, WatchSeesEachChangeAndEndsWithTheServer) {
  grpc::ClientContext context;
  Deadline(&context, 20000);
  const auto reader = health_->Watch(&context, HealthCheckRequest());
  HealthCheckResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  server_->SetServing(true);
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
  server_->SetServing(false);
  server_->SetServing(true);
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);

  const absl::Time begin = absl::Now();
  std::thread stop([&] { server_->Shutdown(absl::Seconds(15)); });
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  stop.join();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  server_ = nullptr;
}

TEST_F(HealthTest, WatchOfAnUnknownServiceSaysSo) {
  grpc::ClientContext context;
  Deadline(&context);
  HealthCheckRequest request;
  request.set_service("nope");
  const auto reader = health_->Watch(&context, request);
  HealthCheckResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVICE_UNKNOWN);
  context.TryCancel();
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

}  // namespace
}  // namespace awqd::services
