// The Open Inference Protocol over a fake engine: the decoded requests, the answers, and the
// protocol's error texts.
#include "tests/server/services/oip_fixture.h"
#include "tests/server/services/raw_call.h"
#include "tests/testing/repeated.h"

namespace awqd::services {
namespace {

using inference::ModelInferRequest;
using inference::ModelInferResponse;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(OipTest, ARequestIsAProductOfTheSameHandler) {
  ModelInferRequest request = GoodInfer(3);
  request.set_id("me");
  (*request.mutable_parameters())["priority"].set_uint64_param(1);
  (*request.mutable_parameters())["timeout"].set_int64_param(2'000'000);
  (*request.mutable_parameters())["execution"].set_bool_param(true);
  const ModelInferResponse response = Answered(request);
  EXPECT_EQ(response.id(), "me");
  EXPECT_EQ(response.model_name(), "tiny/layer");
  ASSERT_EQ(response.outputs_size(), 1);
  EXPECT_EQ(response.outputs(0).name(), "y");
  EXPECT_EQ(response.outputs(0).datatype(), "FP16");
  EXPECT_THAT(response.outputs(0).shape(), ElementsAre(3, 16));
  ASSERT_EQ(response.raw_output_contents_size(), 1);
  EXPECT_EQ(response.raw_output_contents(0).size(), 3u * 16 * 2);
  EXPECT_EQ(response.parameters().at("kernel").string_param(), "fake");
  EXPECT_EQ(response.parameters().at("path").string_param(), "FUSED");
  EXPECT_EQ(engine_.last_matmul().rows, 3);
  EXPECT_EQ(engine_.last_options().priority, 4) << "1 of 9 levels, of which 5 is 0";
  EXPECT_LT(engine_.last_options().deadline, absl::Now() + absl::Seconds(2));
}

TEST_F(OipTest, AnAnswerSaysThatItIsTheLastWhereThatIsAsked) {
  ModelInferRequest request = GoodInfer();
  auto& asked = (*request.mutable_parameters())["triton_enable_empty_final_response"];
  asked.set_bool_param(true);
  const ModelInferResponse response = Answered(request);
  EXPECT_TRUE(response.parameters().at("triton_final_response").bool_param());
  EXPECT_EQ(response.outputs_size(), 1);
  asked.set_bool_param(false);
  EXPECT_TRUE(Answered(request).parameters().empty());
}

TEST_F(OipTest, WithoutParametersItIsAsOurs) {
  EXPECT_TRUE(Answered(GoodInfer()).parameters().empty());
  EXPECT_EQ(engine_.last_options().priority, 0);
  EXPECT_GT(engine_.last_options().deadline, absl::Now() + absl::Seconds(5)) << "the call's";
}

TEST_F(OipTest, TypedContentsAreAnsweredTyped) {
  ModelInferRequest request = GoodInfer(1);
  request.clear_raw_input_contents();
  request.mutable_inputs(0)->set_datatype("FP32");
  auto* values = request.mutable_inputs(0)->mutable_contents()->mutable_fp32_contents();
  Repeat(128, 0.5f, values);
  const ModelInferResponse response = Answered(request);
  EXPECT_EQ(response.outputs(0).datatype(), "FP32");
  EXPECT_EQ(response.outputs(0).contents().fp32_contents_size(), 16);
  EXPECT_EQ(response.raw_output_contents_size(), 0);
  EXPECT_EQ(engine_.last_matmul().x_dtype, DType::kFp32);
  (*request.mutable_parameters())["output_dtype"].set_string_param("BF16");
  EXPECT_EQ(Answered(request).raw_output_contents(0).size(), 16u * 2) << "no field is BF16";
}

TEST_F(OipTest, DequantizeHasNoInput) {
  ModelInferRequest request;
  request.set_model_name("tiny/layer:dequantize");
  (*request.mutable_parameters())["row_begin"].set_int64_param(8);
  (*request.mutable_parameters())["row_end"].set_int64_param(10);
  const ModelInferResponse response = Answered(request);
  EXPECT_EQ(response.outputs(0).name(), "w");
  EXPECT_THAT(response.outputs(0).shape(), ElementsAre(2, 16));
  EXPECT_EQ(response.raw_output_contents(0).size(), 2u * 16 * 2);
  (*request.mutable_parameters())["row_end"].set_int64_param(129);
  ExpectRefused(request, "parameters[row_begin, row_end]: got [8, 129), expected 0 <= begin");
}

TEST_F(OipTest, ErrorsAreInTheWordsOfTheProtocol) {
  ModelInferRequest request = GoodInfer();
  request.mutable_inputs(0)->set_shape(1, 127);
  request.set_raw_input_contents(0, std::string(2 * 127 * 2, '\0'));
  ExpectRefused(request, "inputs[x].shape: got [2, 127], expected [..., 128]");
  request = GoodInfer();
  request.set_raw_input_contents(0, "short");
  ExpectRefused(request, "raw_input_contents[x]: got 5 bytes, expected 512 for FP16");
  request = GoodInfer();
  request.set_id(std::string(257, 'i'));
  ExpectRefused(request, "id: got 257 bytes, expected at most 256");
  request = GoodInfer();
  request.clear_inputs();
  request.clear_raw_input_contents();
  ExpectRefused(request, "inputs[x]: got nothing, expected a tensor of shape [..., K]");
  request = GoodInfer();
  request.set_model_name("tiny");
  ExpectRefused(request, "model_name: got \"tiny\", expected MODEL/WEIGHT");
  request.set_model_name("other/layer");
  ExpectRefused(request, "no such model", grpc::StatusCode::NOT_FOUND);
  request.set_model_name("tiny/nope");
  ExpectRefused(request, "nope", grpc::StatusCode::NOT_FOUND);
  ExpectRefused({}, "model_name: got \"\", expected MODEL/WEIGHT");
  const grpc::Status garbage =
      RawCall(channel_, "/inference.GRPCInferenceService/ModelInfer", "\xff\xff");
  EXPECT_EQ(garbage.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(garbage.error_message(), HasSubstr("inference.ModelInferRequest"));
}

TEST_F(OipTest, TheServedVersionIsServed) {
  ModelInferRequest request = GoodInfer();
  request.set_model_version("1");
  EXPECT_EQ(Answered(request).model_version(), "1");
  request.set_model_version("2");
  ExpectRefused(request, "version: got \"2\", expected \"1\"", grpc::StatusCode::NOT_FOUND);
  ASSERT_TRUE(models_->Load("tiny").ok());
  Answered(request);
}

TEST_F(OipTest, ALargeMessageIsRefusedAsOursIs) {
  ExpectRefused(GoodInfer(kMessageLimit / 256), "max_receive_message_bytes",
                grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(OipTest, BytesInFlightAreGivenBack) {
  Answered(GoodInfer(1000));
  ModelInferRequest request = GoodInfer(1000);
  request.mutable_inputs(0)->set_name("z");
  ExpectRefused(request, "inputs[0].name: got \"z\", expected \"x\"");
  EXPECT_EQ(server_->in_flight_bytes(), 0);
}

TEST_F(OipTest, ServerAndModelsAreReadyWhenTheyAre) {
  grpc::ClientContext live_context, not_ready_context, ready_context;
  inference::ServerLiveResponse live;
  ASSERT_TRUE(oip_->ServerLive(&live_context, {}, &live).ok());
  EXPECT_TRUE(live.live());
  inference::ServerReadyResponse ready;
  ASSERT_TRUE(oip_->ServerReady(&not_ready_context, {}, &ready).ok());
  EXPECT_FALSE(ready.ready());
  server_->SetServing(true);
  ASSERT_TRUE(oip_->ServerReady(&ready_context, {}, &ready).ok());
  EXPECT_TRUE(ready.ready());
  const std::pair<const char*, bool> models[] = {{"tiny", true},
                                                 {"tiny/layer", true},
                                                 {"tiny/layer:dequantize", true},
                                                 {"tiny/nope", false},
                                                 {"other/layer", false}};
  for (const auto& [name, expected] : models) {
    grpc::ClientContext context;
    inference::ModelReadyRequest request;
    request.set_name(name);
    inference::ModelReadyResponse response;
    ASSERT_TRUE(oip_->ModelReady(&context, request, &response).ok()) << name;
    EXPECT_EQ(response.ready(), expected) << name;
  }
}

TEST_F(OipTest, MetadataHasInputsAndOutputs) {
  inference::ModelMetadataRequest request;
  request.set_name("tiny/layer");
  inference::ModelMetadataResponse response;
  grpc::ClientContext context, other_context;
  ASSERT_TRUE(oip_->ModelMetadata(&context, request, &response).ok());
  EXPECT_THAT(response.versions(), ElementsAre("1"));
  ASSERT_EQ(response.inputs_size(), 1);
  EXPECT_EQ(response.inputs(0).name(), "x");
  EXPECT_THAT(response.inputs(0).shape(), ElementsAre(-1, 128));
  EXPECT_THAT(response.outputs(0).shape(), ElementsAre(-1, 16));
  request.set_name("other/layer");
  EXPECT_EQ(oip_->ModelMetadata(&other_context, request, &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace awqd::services
