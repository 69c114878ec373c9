// ModelStreamInfer: answers in the order of their requests, errors inside the stream, any model.
#include "tests/server/services/oip_fixture.h"

namespace awqd::services {
namespace {

using inference::ModelStreamInferResponse;
using ::testing::HasSubstr;
using ::testing::StartsWith;

inference::ModelInferRequest WithId(const std::string& id) {
  inference::ModelInferRequest request = GoodInfer();
  request.set_id(id);
  return request;
}

class OipStreamTest : public OipTest {
 protected:
  void SetUp() override {
    OipTest::SetUp();
    Deadline(&context_);
    stream_ = oip_->ModelStreamInfer(&context_);
  }

  void ExpectEnd() {
    ModelStreamInferResponse response;
    stream_->WritesDone();
    EXPECT_FALSE(stream_->Read(&response));
    const grpc::Status status = stream_->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<inference::ModelInferRequest, ModelStreamInferResponse>>
      stream_;
};

TEST_F(OipStreamTest, AnswersComeInTheOrderOfTheirRequests) {
  engine_.Hold(true);
  for (const char* id : {"0", "1", "2"}) stream_->Write(WithId(id));
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 3; }));
  for (int left = 3; left > 0; --left) engine_.Answer(left - 1);  // the last one first
  ModelStreamInferResponse response;
  for (const char* id : {"0", "1", "2"}) {
    ASSERT_TRUE(stream_->Read(&response));
    EXPECT_EQ(response.infer_response().id(), id);
    EXPECT_EQ(response.error_message(), "");
    EXPECT_EQ(response.infer_response().raw_output_contents(0).size(), 2u * 16 * 2);
  }
  ExpectEnd();
}

TEST_F(OipStreamTest, AFailedRequestLeavesTheStreamOpen) {
  inference::ModelInferRequest bad = WithId("bad");
  bad.mutable_inputs(0)->set_name("z");
  stream_->Write(bad);
  stream_->Write(WithId("good"));
  ModelStreamInferResponse response;
  ASSERT_TRUE(stream_->Read(&response));
  EXPECT_THAT(response.error_message(), StartsWith("INVALID_ARGUMENT: inputs[0].name: got \"z\""));
  EXPECT_EQ(response.infer_response().id(), "bad");
  EXPECT_EQ(response.infer_response().outputs_size(), 0);
  ASSERT_TRUE(stream_->Read(&response));
  EXPECT_EQ(response.infer_response().id(), "good");
  ExpectEnd();
  EXPECT_EQ(server_->in_flight_bytes(), 0);
}

TEST_F(OipStreamTest, OneStreamIsForEveryModel) {
  inference::ModelInferRequest weight;
  weight.set_model_name("tiny/layer:dequantize");
  weight.set_id("w");
  stream_->Write(weight);
  inference::ModelInferRequest large = WithId("y");
  large.set_model_name("tiny/wide");
  large.mutable_inputs(0)->set_shape(0, 100);
  large.set_raw_input_contents(0, std::string(100 * 256, '\0'));
  stream_->Write(large);
  ModelStreamInferResponse response;
  ASSERT_TRUE(stream_->Read(&response));
  EXPECT_EQ(response.infer_response().outputs(0).name(), "w");
  EXPECT_EQ(response.infer_response().raw_output_contents(0).size(), 128u * 16 * 2);
  ASSERT_TRUE(stream_->Read(&response));
  EXPECT_EQ(response.infer_response().outputs(0).name(), "y");
  EXPECT_EQ(response.infer_response().raw_output_contents(0).size(), 100u * 4096 * 2);
  ExpectEnd();
}

TEST_F(OipStreamTest, ACancelledStreamEnds) {
  engine_.Hold(true);
  for (const char* id : {"0", "1"}) stream_->Write(WithId(id));
  ASSERT_TRUE(Eventually([&] { return engine_.held() == 2; }));
  context_.TryCancel();
  engine_.Answer(1);
  engine_.Answer(0);
  ModelStreamInferResponse response;
  while (stream_->Read(&response)) {
  }
  EXPECT_EQ(stream_->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return server_->in_flight_bytes() == 0; }));
}

}  // namespace
}  // namespace awqd::services
