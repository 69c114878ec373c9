// The answers to clients of a server that shuts down.
#include <thread>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "tests/server/services/raw_call.h"
#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {
namespace {

class DrainingTest : public RpcTest {
 protected:
  // The last status of a caller that makes one call after the other.
  grpc::Status AskUntilRefused() {
    for (;;) {
      v1::ListModelsResponse ignored;
      grpc::ClientContext context;
      Deadline(&context);
      const grpc::Status status = repository_->ListModels(&context, {}, &ignored);
      if (!status.ok()) return status;
    }
  }
};

TEST_F(DrainingTest, ACallInFlightIsAnsweredAndALaterOneRefused) {
  engine_.Hold(true);
  grpc::Status first;
  v1::QuantizedMatmulResponse response;
  std::thread caller([&] { first = Matmul(GoodMatmul(), &response); });
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  std::thread stop([&] { server_->Shutdown(absl::Seconds(30)); });
  const grpc::Status later = AskUntilRefused();
  EXPECT_EQ(later.error_code(), grpc::StatusCode::UNAVAILABLE) << later.error_message();
  while (engine_.held() > 0) engine_.Answer();
  caller.join();
  stop.join();
  EXPECT_TRUE(first.ok()) << first.error_message();
  server_ = nullptr;
}

TEST_F(DrainingTest, WhatIsStillInFlightAtTheDeadlineIsCancelled) {
  engine_.Hold(true);
  grpc::Status status;
  v1::QuantizedMatmulResponse response;
  std::thread caller([&] { status = Matmul(GoodMatmul(), &response); });
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 1; }));
  const absl::Time start = absl::Now();
  std::thread answer([&] {
    EXPECT_TRUE(Eventually([&] { return engine_.cancels() == 1; }));
    engine_.Answer();
  });
  server_->Shutdown(absl::Milliseconds(300));
  answer.join();
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  caller.join();
  EXPECT_FALSE(status.ok());
  server_ = nullptr;
}

TEST_F(DrainingTest, AnUploadInProgressIsACallInFlight) {
  for (const char* method :
       {"/awqd.v1.QuantizedInference/QuantizedMatmul", "/awqd.v1.ModelRepository/ListModels"}) {
    SCOPED_TRACE(method);
    if (server_ == nullptr) SetUp();
    RawStream upload(channel_, method);
    ASSERT_TRUE(Eventually([&] { return server_->admission()->drain()->in_flight() == 1; }))
        << "the headers are here";
    std::thread stop([&] { server_->Shutdown(absl::Seconds(30)); });
    EXPECT_EQ(AskUntilRefused().error_code(), grpc::StatusCode::UNAVAILABLE);
    // Longer than the server waits at its end for clients without calls in flight.
    absl::SleepFor(3 * transport::kRoundTrip);
    const std::string request =
        absl::EndsWith(method, "ListModels") ? std::string() : GoodMatmul().SerializeAsString();
    EXPECT_TRUE(upload.Write(request));
    EXPECT_TRUE(upload.WritesDone());
    std::string answer;
    EXPECT_TRUE(upload.Read(&answer));
    const grpc::Status status = upload.Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    stop.join();
    server_ = nullptr;
  }
}

TEST_F(DrainingTest, AnUploadThatNeverEndsIsCutAtTheDeadline) {
  RawStream upload(channel_, "/awqd.v1.QuantizedInference/QuantizedMatmul");
  ASSERT_TRUE(Eventually([&] { return server_->admission()->drain()->in_flight() == 1; }));
  const absl::Time start = absl::Now();
  server_->Shutdown(absl::Milliseconds(500));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(500));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  EXPECT_FALSE(upload.Finish().ok());
  server_ = nullptr;
}

TEST_F(DrainingTest, AnIdleStreamIsEndedAndDoesNotHoldTheEndBack) {
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(stream->Write(GoodMatmul()) && stream->Read(&response));
  std::thread stop([&] { server_->Shutdown(absl::Seconds(30)); });
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  const absl::Time told = absl::Now();
  stop.join();
  EXPECT_LT(absl::Now() - told, absl::Seconds(5));
  server_ = nullptr;
}

TEST_F(DrainingTest, AStreamIsEndedAfterWhatItWasPromised) {
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(stream->Write(GoodMatmul()) && stream->Read(&response));
  EXPECT_FALSE(response.has_error());
  engine_.Hold(true);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream->Write(GoodMatmul()));
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 3; }));
  std::thread stop([&] { server_->Shutdown(absl::Seconds(30)); });
  EXPECT_EQ(AskUntilRefused().error_code(), grpc::StatusCode::UNAVAILABLE);
  while (engine_.held() > 0) engine_.Answer();
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(stream->Read(&response)) << i;
    EXPECT_FALSE(response.has_error()) << response.error().message();
  }
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  stop.join();
  server_ = nullptr;
}

}  // namespace
}  // namespace awqd::services
