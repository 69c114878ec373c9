// INT8 activations through the real server: exact INT32, alone and merged, and what is refused.
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/inference/golden_models.h"
#include "tests/e2e/server_test.h"

namespace awqd {
namespace {

using client::MatmulCall;
using client::Tensor;
using client::WeightName;
using ::testing::HasSubstr;

std::vector<GoldenCase> IntegerCases() {
  std::vector<GoldenCase> out;
  for (GoldenCase& golden : GoldenCases("gemlite")) {
    if (!golden.int8_matmul.empty()) out.push_back(std::move(golden));
  }
  return out;
}

class IntegersTest : public SharedServerTest {
 protected:
  void SetUp() override {
    for (const GoldenCase& golden : IntegerCases()) {
      const std::string folder = *repository_ / golden.model;
      if (!std::filesystem::exists(folder)) std::filesystem::copy(golden.Folder(), folder);
      ASSERT_TRUE(client_->LoadModel(golden.model).ok());
    }
  }

  static MatmulCall Call(const GoldenCase& golden) {
    return {.weight = WeightName{golden.model, golden.weight},
            .activations = ReadTensor(golden.int8_activations)};
  }

  // A tensor of ones.
  static Tensor Int8(std::vector<int64_t> shape) {
    Tensor out = {.dtype = v1::INT8, .shape = std::move(shape), .bytes = ""};
    out.bytes.assign(*client::ElementCount(out.shape), '\x01');
    return out;
  }

  // Changes a good call, and returns its refusal.
  std::string Refused(const std::function<void(MatmulCall*)>& spoil) {
    MatmulCall call = Call(IntegerCases().front());
    EXPECT_TRUE(client_->QuantizedMatmul(call).ok());
    spoil(&call);
    const auto y = client_->QuantizedMatmul(std::move(call));
    EXPECT_EQ(y.status().code(), absl::StatusCode::kInvalidArgument) << y.status();
    return std::string(y.status().message());
  }
};

TEST_F(IntegersTest, AreExactFromAFolderAndInTheRequest) {
  ASSERT_EQ(IntegerCases().size(), 5u);
  for (const GoldenCase& golden : IntegerCases()) {
    SCOPED_TRACE(golden.Name());
    const Tensor want = ReadTensor(golden.int8_matmul);
    for (const bool in_request : {false, true}) {
      MatmulCall call = Call(golden);
      if (in_request) call.weight = InlineOf(golden);
      const auto y = client_->QuantizedMatmul(std::move(call));
      ASSERT_TRUE(y.ok()) << y.status();
      EXPECT_EQ(y->output.dtype, v1::INT32);
      EXPECT_EQ(y->output.shape, want.shape);
      EXPECT_EQ(y->output.bytes, want.bytes);
      EXPECT_THAT(y->execution.kernel(), HasSubstr("qmatmul_a8"));
    }
  }
}

TEST_F(IntegersTest, ManyOnOneStream) {
  const auto stream = client_->QuantizedMatmulStream({.timeout = absl::Seconds(60)});
  const std::vector<GoldenCase> cases = IntegerCases();
  for (int i = 0; i < 40; ++i) {
    MatmulCall call = Call(cases[i % cases.size()]);
    call.request_id = absl::StrCat(i);
    ASSERT_TRUE(stream->Send(std::move(call)).ok());
  }
  ASSERT_TRUE(stream->CloseSend().ok());
  int answers = 0;
  for (auto answer = stream->Receive(); answer.ok() && answer->has_value();
       answer = stream->Receive(), ++answers) {
    ASSERT_TRUE((*answer)->result.ok()) << (*answer)->result.status();
    const int id = std::stoi((*answer)->request_id);
    EXPECT_EQ((*answer)->result->output.bytes,
              ReadTensor(cases[id % cases.size()].int8_matmul).bytes);
  }
  EXPECT_EQ(answers, 40);
}

TEST_F(IntegersTest, RefusesWhatIsNoIntegers) {
  static const std::vector<float> kSixteen(16);
  EXPECT_THAT(Refused([](MatmulCall* c) { c->output_dtype = v1::FP16; }),
              HasSubstr("output_dtype: got FP16, expected INT32"));
  EXPECT_THAT(Refused([](MatmulCall* c) { c->activation_function = v1::RELU; }),
              HasSubstr("activation_function: got RELU, expected NONE for INT8 activations"));
  EXPECT_THAT(Refused([](MatmulCall* c) {
                v1::PackedWeight packed = InlineOf(IntegerCases().front());
                packed.mutable_tensors()->insert(
                    {"bias", client::ToProto(*Tensor::FromFloats(v1::FP32, {16}, kSixteen))});
                c->weight = packed;
              }),
              HasSubstr("the product has a bias"));
}

TEST_F(IntegersTest, RefusesAWeightWithScalesAndSumsPastInt32) {
  for (const GoldenCase& golden : GoldenCases("gemlite")) {
    if (!golden.int8_matmul.empty()) continue;
    MatmulCall call = {.weight = InlineOf(golden), .activations = Int8({1, golden.k})};
    const auto y = client_->QuantizedMatmul(std::move(call));
    EXPECT_EQ(y.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(y.status().message()),
                HasSubstr("activations.dtype: got INT8, expected FP16, BF16 or FP32, because"));
  }
  v1::PackedWeight long_sums;
  long_sums.set_format("gemlite");
  long_sums.mutable_settings()->insert({"bits", "8"});
  constexpr int64_t kWords = 16896;  // K = 67584, N = 1
  long_sums.mutable_tensors()->insert(
      {"qweight",
       client::ToProto(
           {.dtype = v1::INT32, .shape = {1, kWords}, .bytes = std::string(4 * kWords, '\xff')})});
  const auto y =
      client_->QuantizedMatmul({.weight = long_sums, .activations = Int8({1, 4 * kWords})});
  EXPECT_EQ(y.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(y.status().message()),
              HasSubstr("sums of w8c+1 may pass INT32 from K = 65794 on, got 67584"));
}

}  // namespace
}  // namespace awqd
