// QuantizedMatmul through the real server and the real client.
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "client/files/npy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/e2e/inference/inference_fixture.h"

namespace awqd {
namespace {

using client::MatmulCall;
using client::Tensor;
using client::WeightName;

TEST_F(InferenceTest, Goldens) {
  const auto manifest = nlohmann::json::parse(std::ifstream(Golden("cases.json")));
  ASSERT_GE(manifest.at("cases").size(), 6u);
  for (const auto& golden : manifest.at("cases")) {
    const WeightName weight{golden.at("model"), golden.at("weight")};
    SCOPED_TRACE(weight.name);
    const auto x = client::ReadNpy(Golden(golden.at("activations")));
    const auto expected = client::ReadNpy(Golden(golden.at("matmul")));
    ASSERT_TRUE(x.ok() && expected.ok());
    for (const v1::Path path : {v1::FUSED, v1::DEQUANTIZE}) {
      const auto y = client_->QuantizedMatmul(
          {.weight = weight, .activations = *client::ToTensor(*x), .path = path});
      ASSERT_TRUE(y.ok()) << y.status();
      EXPECT_EQ(y->output.shape, expected->shape);
      EXPECT_LE(RelativeError(y->output, expected->ToDoubles()), 1e-3);
      EXPECT_EQ(y->execution.path(), path);
      EXPECT_FALSE(y->execution.kernel().empty());
    }
    const auto w = client_->Dequantize({.weight = weight});
    ASSERT_TRUE(w.ok()) << w.status();
    EXPECT_EQ(Fnv1a64(w->output.bytes), golden.at("dequantized_fnv1a64").get<std::string>());
  }
}

// From 256 tokens on the weight is decoded first, unless this CPU has a faster fused kernel.
TEST_F(InferenceTest, TokenCountChoosesThePath) {
  const auto model = client_->GetModel(kDemoModel);
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_GT(model->weights_size(), 0);
  v1::Path many = v1::DEQUANTIZE;
  for (const v1::PlanEntry& row : model->weights(0).plan()) {
    if (row.kernel() == "cpu/qmatmul_a16_pairs") many = v1::FUSED;
  }
  for (const auto& [tokens, path] :
       {std::pair{1, v1::FUSED}, {255, v1::FUSED}, {256, many}, {257, many}}) {
    SCOPED_TRACE(tokens);
    const auto chosen = client_->QuantizedMatmul(Call(tokens));
    ASSERT_TRUE(chosen.ok()) << chosen.status();
    EXPECT_EQ(chosen->execution.path(), path);
    MatmulCall other = Call(tokens);
    other.path = path == v1::FUSED ? v1::DEQUANTIZE : v1::FUSED;
    const auto forced = client_->QuantizedMatmul(other);
    ASSERT_TRUE(forced.ok()) << forced.status();
    EXPECT_EQ(forced->execution.path(), other.path);
    EXPECT_LE(RelativeError(chosen->output, Doubles(forced->output)), 1e-3);
  }
}

TEST_F(InferenceTest, ShapesOfActivations) {
  const auto none = client_->QuantizedMatmul(Call(0));
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_THAT(none->output.shape, ::testing::ElementsAre(0, kN));
  const auto flat = client_->QuantizedMatmul(Call(6));
  MatmulCall cube = Call(6);
  cube.activations.shape = {2, 3, kK};
  const auto y = client_->QuantizedMatmul(cube);
  ASSERT_TRUE(y.ok() && flat.ok()) << y.status();
  EXPECT_THAT(y->output.shape, ::testing::ElementsAre(2, 3, kN));
  EXPECT_EQ(y->output.bytes, flat->output.bytes);
  cube = Call(1);
  cube.activations.shape = {kK};
  EXPECT_THAT(client_->QuantizedMatmul(cube)->output.shape, ::testing::ElementsAre(kN));
}

TEST_F(InferenceTest, EveryDTypeInAndOut) {
  const auto reference = client_->QuantizedMatmul(Call(5, 1, v1::FP32));
  ASSERT_TRUE(reference.ok()) << reference.status();
  for (const v1::DType in : {v1::FP16, v1::BF16, v1::FP32}) {
    for (const v1::DType out : {v1::DTYPE_UNSPECIFIED, v1::FP16, v1::BF16, v1::FP32}) {
      MatmulCall call = Call(5, 1, in);
      call.output_dtype = out;
      const auto y = client_->QuantizedMatmul(call);
      ASSERT_TRUE(y.ok()) << y.status();
      EXPECT_EQ(y->output.dtype, out == v1::DTYPE_UNSPECIFIED ? in : out);
      const bool bf16 = in == v1::BF16 || y->output.dtype == v1::BF16;
      EXPECT_LE(RelativeError(y->output, Doubles(reference->output)), bf16 ? 8e-3 : 1e-3);
    }
  }
}

TEST_F(InferenceTest, BiasReplacesTheWeightsOwn) {
  MatmulCall call = Call(3, 1, v1::FP32);
  call.bias = *Tensor::FromFloats(v1::FP32, {kN}, std::vector<float>(kN, 0.0f));
  const auto zero = client_->QuantizedMatmul(call);
  call.bias = *Tensor::FromFloats(v1::FP16, {kN}, std::vector<float>(kN, 8.0f));
  const auto eight = client_->QuantizedMatmul(call);
  call.bias.reset();
  const auto own = client_->QuantizedMatmul(call);
  ASSERT_TRUE(zero.ok() && eight.ok() && own.ok()) << zero.status();
  const auto a = Doubles(zero->output), b = Doubles(eight->output);
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(b[i] - a[i], 8, 1e-4);
  EXPECT_NE(own->output.bytes, zero->output.bytes) << "the demo weight has a bias";
}

TEST_F(InferenceTest, NanAndInfStayInTheirRow) {
  const auto clean = client_->QuantizedMatmul(Call(3));
  MatmulCall call = Call(3);
  const uint16_t nan = 0x7e00, inf = 0x7c00;
  std::memcpy(call.activations.bytes.data() + 2 * kK, &nan, 2);
  std::memcpy(call.activations.bytes.data() + 4 * kK, &inf, 2);
  const auto y = client_->QuantizedMatmul(call);
  ASSERT_TRUE(y.ok() && clean.ok()) << y.status();
  EXPECT_EQ(y->output.bytes.substr(0, 2 * kN), clean->output.bytes.substr(0, 2 * kN));
  const auto values = Doubles(y->output);
  for (int64_t i = 0; i < kN; ++i) ASSERT_TRUE(std::isnan(values[kN + i])) << i;
  int64_t not_finite = 0;
  for (int64_t i = 0; i < kN; ++i) not_finite += std::isfinite(values[2 * kN + i]) ? 0 : 1;
  EXPECT_GT(not_finite, kN / 2) << "only a zero weight may keep an infinity out";
}

TEST_F(InferenceTest, ManyOnOneStream) {
  const auto stream = client_->QuantizedMatmulStream({.timeout = absl::Seconds(60)});
  std::map<std::string, MatmulCall> sent;
  for (int i = 0; i < 40; ++i) {
    MatmulCall call = Call(1 + i % 5, i);
    call.request_id = absl::StrCat("id", i);
    if (i == 7) call.weight = WeightName{kDemoModel, "nowhere"};
    sent.emplace(call.request_id, call);
    ASSERT_TRUE(stream->Send(call).ok());
  }
  ASSERT_TRUE(stream->CloseSend().ok());
  size_t answers = 0;
  for (auto answer = stream->Receive(); answer.ok() && answer->has_value();
       answer = stream->Receive(), ++answers) {
    const std::string& id = (*answer)->request_id;
    ASSERT_EQ(sent.count(id), 1u) << id;
    if (id == "id7") {
      EXPECT_EQ((*answer)->result.status().code(), absl::StatusCode::kNotFound);
    } else {
      ASSERT_TRUE((*answer)->result.ok()) << (*answer)->result.status();
      const auto alone = client_->QuantizedMatmul(sent.at(id));
      EXPECT_LE(RelativeError((*answer)->result->output, Doubles(alone->output)), 1e-3);
    }
  }
  EXPECT_EQ(answers, sent.size());
}

}  // namespace
}  // namespace awqd
