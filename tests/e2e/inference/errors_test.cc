// The errors that the real server sends for refused requests.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/inference/inference_fixture.h"

namespace awqd {
namespace {

using client::MatmulCall;
using client::Tensor;
using client::WeightName;
using ::testing::HasSubstr;

TEST_F(InferenceTest, ErrorsNameTheField) {
  using absl::StatusCode;
  const auto expect = [](const absl::Status& status, StatusCode code, const char* text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  MatmulCall call = Call(1);
  call.weight = WeightName{"absent", kQuery};
  expect(Error(call), StatusCode::kNotFound, "absent");
  call.weight = WeightName{kDemoModel, "absent.layer"};
  expect(Error(call), StatusCode::kNotFound, "absent.layer");
  call.weight = WeightName{"../etc", kQuery};
  EXPECT_FALSE(Error(call).ok());
  call.weight = WeightName{"", ""};
  expect(Error(call), StatusCode::kInvalidArgument, "model");
  call = Call(1);
  call.activations.shape = {1, kK - 1};
  expect(Error(call), StatusCode::kInvalidArgument, "activations");
  call.activations = *Tensor::FromFloats(v1::FP16, {1, 8}, Random(8, 1));
  expect(Error(call), StatusCode::kInvalidArgument, "384");
  call.activations = {v1::INT8, {1, kK}, std::string(kK, '\0')};
  expect(Error(call), StatusCode::kInvalidArgument, "activations");
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{-1, kK}, {int64_t{1} << 62, 4, kK}, {}, std::vector<int64_t>(9, 1)}) {
    call.activations = {v1::FP16, shape, ""};
    expect(Error(call), StatusCode::kInvalidArgument, "activations");
  }
  call = Call(1);
  call.bias = *Tensor::FromFloats(v1::FP32, {kN - 1}, Random(kN - 1, 1));
  expect(Error(call), StatusCode::kInvalidArgument, "bias");
  call = Call(1);
  call.output_dtype = v1::INT8;
  expect(Error(call), StatusCode::kInvalidArgument, "output_dtype");
  call = Call(1);
  call.request_id = std::string(257, 'x');
  expect(Error(call), StatusCode::kInvalidArgument, "request_id");
  expect(client_->Dequantize({.weight = WeightName{kDemoModel, kQuery}, .row_begin = 400}).status(),
         StatusCode::kInvalidArgument, "rows");
  expect(client_->LoadModel("../x").status(), StatusCode::kInvalidArgument, "name");
  expect(client_->LoadModel("absent").status(), StatusCode::kNotFound, "absent");
  expect(client_->UnloadModel("absent"), StatusCode::kNotFound, "absent");
  expect(client_->GetModel("absent").status(), StatusCode::kNotFound, "absent");
  expect(client_->IsServing("absent").status(), StatusCode::kNotFound, "");
  // Tens of milliseconds of work, because a short product may be answered before gRPC's timer
  // fires.
  const MatmulCall slow = {
      .weight = WeightName{"big", "layer"},
      .activations = *Tensor::FromFloats(v1::FP16, {64, kBigK}, Random(64 * kBigK, 1))};
  const absl::Status late =
      client_->QuantizedMatmul(slow, {.timeout = absl::Milliseconds(1)}).status();
  EXPECT_EQ(late.code(), StatusCode::kDeadlineExceeded) << late;
  EXPECT_TRUE(client_->QuantizedMatmul(Call(1)).ok()) << "after all that it still serves";
}

}  // namespace
}  // namespace awqd
