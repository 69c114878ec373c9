// QuantizedMatmulStream: completion order, bounded flight, errors inside the stream, cancels.
#include <set>

#include "tests/server/services/rpc_fixture.h"

namespace awqd::services {
namespace {

using StreamTest = RpcTest;  // at most 4 in flight

v1::QuantizedMatmulRequest WithId(const std::string& id) {
  v1::QuantizedMatmulRequest request = GoodMatmul();
  request.set_request_id(id);
  return request;
}

TEST_F(StreamTest, AnswersComeInCompletionOrder) {
  engine_.Hold(true);
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  for (const char* id : {"0", "1", "2"}) stream->Write(WithId(id));
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 3; }));
  v1::QuantizedMatmulResponse response;
  for (const char* id : {"2", "1", "0"}) {
    engine_.Answer(engine_.held() - 1);
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.request_id(), id);
    EXPECT_FALSE(response.has_error());
  }
  stream->WritesDone();
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, ReadsNoFurtherThanTheBound) {
  engine_.Hold(true);
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  for (int i = 0; i < 10; ++i) stream->Write(WithId(std::to_string(i)));
  stream->WritesDone();
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 4; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(engine_.held(), 4u);
  std::set<std::string> ids;
  v1::QuantizedMatmulResponse response;
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(Eventually([&] { return engine_.held() > 0; }));
    engine_.Answer();
    ASSERT_TRUE(stream->Read(&response));
    ids.insert(response.request_id());
  }
  EXPECT_EQ(ids.size(), 10u);
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, AFailedRequestLeavesTheStreamOpen) {
  grpc::ClientContext context;
  Deadline(&context);
  const auto stream = stub_->QuantizedMatmulStream(&context);
  v1::QuantizedMatmulRequest bad = WithId("bad");
  bad.clear_activations();
  stream->Write(bad);
  v1::QuantizedMatmulResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_id(), "bad");
  EXPECT_EQ(response.error().code(), static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
  EXPECT_THAT(response.error().message(), ::testing::HasSubstr("activations"));
  stream->Write({});
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.error().code(), static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
  stream->Write(WithId("good"));
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_FALSE(response.has_error());
  EXPECT_EQ(response.output().shape(1), 16);
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, AnEmptyStreamEndsWell) {
  grpc::ClientContext context;
  const auto stream = stub_->QuantizedMatmulStream(&context);
  stream->WritesDone();
  v1::QuantizedMatmulResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StreamTest, CancelWithdrawsEverythingInFlight) {
  engine_.Hold(true);
  grpc::ClientContext context;
  const auto stream = stub_->QuantizedMatmulStream(&context);
  for (int i = 0; i < 6; ++i) stream->Write(WithId("x"));
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 4; }));
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(Eventually([&] { return engine_.cancels() == 4; }));
  for (int i = 0; i < 4; ++i) engine_.Answer();
  EXPECT_EQ(engine_.held(), 0u);
  EXPECT_EQ(engine_.submitted(), 4);
}

TEST_F(StreamTest, CancelAtAnyMomentLeavesTheServerWell) {
  for (int i = 0; i < 100; ++i) {
    grpc::ClientContext context;
    const auto stream = stub_->QuantizedMatmulStream(&context);
    std::thread cancel([&, i] {
      std::this_thread::sleep_for(std::chrono::microseconds(i * 30));
      context.TryCancel();
    });
    v1::QuantizedMatmulResponse response;
    while (stream->Write(WithId("x")) && stream->Read(&response)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
    cancel.join();
  }
  v1::QuantizedMatmulResponse response;
  EXPECT_TRUE(Matmul(GoodMatmul(), &response).ok());
}

}  // namespace
}  // namespace awqd::services
