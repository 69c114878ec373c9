// Experts by libawqd's C header alone: products and gated MLPs against goldens, and every refusal by
// its words.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/exact.h"
#include "kernels/library/awqd.h"
#include "tests/kernels/library/owned.h"
#include "tests/testing/npy.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using testing::CheckpointPtr;
using testing::DevicePtr;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::StackPtr;
using testing::WeightPtr;
using testing::Workspace;

constexpr int64_t kExperts = 5, kK = 64, kMiddle = 96, kN = 72, kTokens = 11, kTopK = 3;

testing::Npy GoldenOfExperts(const std::string& name) {
  auto npy = testing::ReadNpy(DataPath("experts/goldens/" + name + ".npy"));
  EXPECT_TRUE(npy.ok()) << npy.status();
  return *std::move(npy);
}

class ExpertsTest : public ::testing::Test {
 protected:
  ExpertsTest() {
    awqd_device* device = nullptr;
    EXPECT_EQ(awqd_device_open("cpu", nullptr, &device), AWQD_OK) << awqd_error_message();
    device_.reset(device);
    awqd_checkpoint* checkpoint = nullptr;
    EXPECT_EQ(awqd_checkpoint_open(DataPath("experts/moe").c_str(), &checkpoint), AWQD_OK)
        << awqd_error_message();
    checkpoint_.reset(checkpoint);
    gate_ = Load("moe.experts.", ".gate_proj");
    up_ = Load("moe.experts.", ".up_proj");
    down_ = Load("moe.experts.", ".down_proj");
    matmul_.m = mlp_.m = kTokens;
    matmul_.top_k = mlp_.top_k = kTopK;
    matmul_.x = mlp_.x = x_.bytes.data();
    matmul_.expert_ids = mlp_.expert_ids = reinterpret_cast<const int32_t*>(ids_.bytes.data());
    matmul_.x_dtype = masked_.x_dtype = mlp_.x_dtype = AWQD_FP16;
    matmul_.y_dtype = masked_.y_dtype = mlp_.y_dtype = AWQD_FP32;
    matmul_.activation = masked_.activation = mlp_.activation = AWQD_SILU;
    matmul_.y = mlp_.y = y_.data();
    mlp_.gate = gate_.get(), mlp_.up = up_.get(), mlp_.down = down_.get();
  }

  WeightPtr LoadOne(const std::string& linear) {
    awqd_weight* weight = nullptr;
    EXPECT_EQ(awqd_weight_load(device_.get(), checkpoint_.get(), linear.c_str(), &weight), AWQD_OK)
        << awqd_error_message();
    return WeightPtr(weight);
  }
  // The weights end before the stack.
  StackPtr Load(const std::string& before, const std::string& after) {
    std::vector<WeightPtr> owners;
    std::vector<const awqd_weight*> weights;
    for (int64_t e = 0; e < kExperts; ++e) {
      owners.push_back(LoadOne(absl::StrCat(before, e, after)));
      weights.push_back(owners.back().get());
    }
    awqd_stack* stack = nullptr;
    EXPECT_EQ(awqd_stack_make(weights.data(), weights.size(), &stack), AWQD_OK)
        << awqd_error_message();
    return StackPtr(stack);
  }

  int Multiply() {
    int64_t bytes = 0;
    const int code = awqd_grouped_matmul_workspace(gate_.get(), &matmul_, &bytes);
    if (code != AWQD_OK) return code;
    return awqd_grouped_matmul(gate_.get(), &matmul_, Workspace(bytes).get(), nullptr);
  }
  int MultiplyMasked() {
    int64_t bytes = 0;
    const int code = awqd_masked_matmul_workspace(gate_.get(), &masked_, &bytes);
    if (code != AWQD_OK) return code;
    return awqd_masked_matmul(gate_.get(), &masked_, Workspace(bytes).get(), nullptr);
  }
  int RunMlp() {
    int64_t bytes = 0;
    if (const int code = awqd_grouped_mlp_workspace(&mlp_, &bytes); code != AWQD_OK) return code;
    return awqd_grouped_mlp(&mlp_, Workspace(bytes).get(), nullptr);
  }
  void ExpectGolden(int code, const std::string& name) {
    ASSERT_EQ(code, AWQD_OK) << awqd_error_message();
    const testing::Npy golden = GoldenOfExperts(name);
    const auto count = static_cast<int64_t>(golden.bytes.size() / 8);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_NEAR(y_[i], golden.At<double>(i), 2e-3) << name << " " << i;
    }
  }
  void ExpectRefused(int code, const std::string& message) {
    EXPECT_EQ(code, AWQD_INVALID_ARGUMENT) << message;
    EXPECT_THAT(awqd_error_message(), HasSubstr(message));
  }

  DevicePtr device_;
  CheckpointPtr checkpoint_;
  StackPtr gate_, up_, down_;
  const testing::Npy x_ = GoldenOfExperts("x"), ids_ = GoldenOfExperts("ids"),
                     router_ = GoldenOfExperts("router");
  const float* const routed_ = reinterpret_cast<const float*>(router_.bytes.data());
  std::vector<float> y_ = std::vector<float>(kTokens * kTopK * kMiddle);
  awqd_grouped_matmul_args matmul_ = AWQD_INIT(matmul_);
  awqd_masked_matmul_args masked_ = AWQD_INIT(masked_);
  awqd_grouped_mlp_args mlp_ = AWQD_INIT(mlp_);
};

TEST_F(ExpertsTest, ProductsAreTheGoldens) {
  ExpectGolden(Multiply(), "grouped");
  ExpectGolden(RunMlp(), "mlp");
  matmul_.router_weights = mlp_.router_weights = routed_;
  ExpectGolden(Multiply(), "grouped_summed");
  ExpectGolden(RunMlp(), "mlp_summed");
}

TEST_F(ExpertsTest, ATokenAloneHasTheSameBits) {
  mlp_.router_weights = routed_;
  ASSERT_EQ(RunMlp(), AWQD_OK) << awqd_error_message();
  const std::vector<float> all = y_;
  int64_t enough = 0;
  ASSERT_EQ(awqd_grouped_mlp_workspace(&mlp_, &enough), AWQD_OK);
  Workspace workspace(enough);  // for fewer tokens too
  const awqd_grouped_mlp_args whole = mlp_;
  for (int64_t t = 0; t < kTokens; ++t) {
    mlp_.m = 1;
    mlp_.x = x_.bytes.data() + t * kK * 2;
    mlp_.expert_ids = whole.expert_ids + t * kTopK;
    mlp_.router_weights = routed_ + t * kTopK;
    ASSERT_EQ(awqd_grouped_mlp(&mlp_, workspace.get(), nullptr), AWQD_OK) << awqd_error_message();
    for (int64_t n = 0; n < kN; ++n) ASSERT_EQ(y_[n], all[t * kN + n]) << t << " " << n;
  }
  mlp_.m = 0;
  mlp_.x = mlp_.y = nullptr;
  EXPECT_EQ(RunMlp(), AWQD_OK) << "no tokens: " << awqd_error_message();
}

// Rounded activations give what the products of one token and one expert after the other give.
TEST_F(ExpertsTest, RoundActivations) {
  std::vector<WeightPtr> weights;
  for (const char* const projection : {"gate_proj", "up_proj", "down_proj"}) {
    for (int64_t e = 0; e < kExperts; ++e) {
      weights.push_back(LoadOne(absl::StrCat("moe.experts.", e, ".", projection)));
    }
  }
  for (const int32_t how : {AWQD_FP8_PER_TOKEN, AWQD_FP8_PER_BLOCK_128}) {
    const auto multiply = [&](int64_t weight, const void* x, int32_t x_dtype, int64_t n,
                              int32_t activation) {
      std::vector<float> y(n);
      awqd_matmul_args args = AWQD_INIT(args);
      args.m = 1, args.x = x, args.y = y.data();
      args.x_dtype = x_dtype, args.y_dtype = AWQD_FP32;
      args.activation = activation, args.quantization = how;
      const awqd_weight* const on = weights[weight].get();
      int64_t bytes = 0;
      EXPECT_EQ(awqd_matmul_workspace(on, &args, &bytes), AWQD_OK) << awqd_error_message();
      EXPECT_EQ(awqd_matmul(on, &args, Workspace(bytes).get(), nullptr), AWQD_OK)
          << awqd_error_message();
      return y;
    };
    std::vector<float> products, mlps;
    for (int64_t choice = 0; choice < kTokens * kTopK; ++choice) {
      const int64_t expert = matmul_.expert_ids[choice];
      const void* const x = x_.bytes.data() + choice / kTopK * kK * 2;
      std::vector<float> gate = multiply(expert, x, AWQD_FP16, kMiddle, AWQD_NONE);
      const std::vector<float> up = multiply(kExperts + expert, x, AWQD_FP16, kMiddle, AWQD_NONE);
      for (int64_t i = 0; i < kMiddle; ++i) {
        products.push_back(ActivateFloat(ActivationFunction::kSilu, gate[i]));
        gate[i] = GateFloat(ActivationFunction::kSilu, {}, gate[i], up[i]);
      }
      const std::vector<float> y =
          multiply(2 * kExperts + expert, gate.data(), AWQD_FP32, kN, AWQD_NONE);
      mlps.insert(mlps.end(), y.begin(), y.end());
    }
    ASSERT_EQ(Multiply(), AWQD_OK) << awqd_error_message();
    EXPECT_NE(y_, products) << "unquantized";
    matmul_.quantization = mlp_.quantization = how;
    ASSERT_EQ(Multiply(), AWQD_OK) << awqd_error_message();
    EXPECT_EQ(y_, products);
    ASSERT_EQ(RunMlp(), AWQD_OK) << awqd_error_message();
    EXPECT_EQ(std::vector<float>(y_.begin(), y_.begin() + kTokens * kTopK * kN), mlps);
    matmul_.quantization = AWQD_UNQUANTIZED;
  }
  for (const int32_t other : std::vector<int32_t>{AWQD_INT8_PER_TOKEN, AWQD_FP8_STATIC, 9, -1}) {
    matmul_.quantization = mlp_.quantization = other;
    ExpectRefused(Multiply(), absl::StrCat("args->quantization: got ", other, ", expected "));
    ExpectRefused(RunMlp(), absl::StrCat("args->quantization: got ", other, ", expected "));
  }
}

// Rows that are valid have the bits of the same rows sorted by expert; others of y are untouched.
TEST_F(ExpertsTest, MaskedRowsHaveTheBitsOfSortedOnes) {
  constexpr int64_t kMaxRows = 4;
  const std::vector<int32_t> counts = {2, 0, 4, 1, 3};
  // Row i of expert e is token (e * kMaxRows + i) % kTokens. Rows that are not valid hold NaNs.
  std::vector<uint16_t> rows(kExperts * kMaxRows * kK, 0x7e00), sorted;
  std::vector<int32_t> ids, valid;
  for (int32_t e = 0; e < kExperts; ++e) {
    for (int64_t i = 0; i < counts[e]; ++i) {
      const int64_t row = e * kMaxRows + i;
      const auto* const token =
          reinterpret_cast<const uint16_t*>(x_.bytes.data()) + row % kTokens * kK;
      std::copy(token, token + kK, rows.begin() + row * kK);
      sorted.insert(sorted.end(), token, token + kK);
      ids.push_back(e), valid.push_back(static_cast<int32_t>(row));
    }
  }
  for (const int32_t how : {AWQD_UNQUANTIZED, AWQD_FP8_PER_TOKEN, AWQD_FP8_PER_BLOCK_128}) {
    for (const int32_t y_dtype : {AWQD_FP32, AWQD_FP16}) {
      const int64_t row_bytes = kMiddle * (y_dtype == AWQD_FP32 ? 4 : 2);
      matmul_.m = static_cast<int64_t>(ids.size()), matmul_.top_k = 1;
      matmul_.x = sorted.data(), matmul_.expert_ids = ids.data();
      matmul_.y_dtype = y_dtype, matmul_.quantization = how;
      ASSERT_EQ(Multiply(), AWQD_OK) << awqd_error_message();
      std::vector<uint8_t> y(kExperts * kMaxRows * row_bytes, 0xa5);
      std::vector<uint8_t> expected = y;
      for (size_t i = 0; i < valid.size(); ++i) {
        std::memcpy(&expected[valid[i] * row_bytes],
                    reinterpret_cast<const uint8_t*>(y_.data()) + i * row_bytes, row_bytes);
      }
      masked_.max_rows = kMaxRows, masked_.expected_rows = how == AWQD_UNQUANTIZED ? 0 : 2;
      masked_.x = rows.data(), masked_.y = y.data(), masked_.counts = counts.data();
      masked_.y_dtype = y_dtype, masked_.quantization = how;
      ASSERT_EQ(MultiplyMasked(), AWQD_OK) << awqd_error_message();
      EXPECT_EQ(y, expected) << "quantization " << how << " y " << y_dtype;
    }
  }
}

TEST_F(ExpertsTest, RefusesWhatAreNoMasks) {
  std::vector<int32_t> counts = {0, 1, 2, 1, 0};
  masked_.max_rows = 2, masked_.x = x_.bytes.data(), masked_.y = y_.data();
  masked_.counts = counts.data();
  y_.assign(y_.size(), 9);
  counts[3] = 3;
  ExpectRefused(MultiplyMasked(), "args->counts[3]: got 3, expected 0 to 2");
  counts[3] = -1;
  ExpectRefused(MultiplyMasked(), "args->counts[3]: got -1, expected 0 to 2");
  EXPECT_THAT(y_, Each(9)) << "nothing was computed";
  counts[3] = 1;
  const awqd_masked_matmul_args good = masked_;
  const auto refused = [&](auto change, const std::string& message) {
    masked_ = good;
    change();
    ExpectRefused(MultiplyMasked(), message);
  };
  refused([&] { masked_.size = 8; }, "args->size: got 8, expected 64");
  refused([&] { masked_.max_rows = -1; }, "args->max_rows: got -1, expected 0 to 214748364");
  refused([&] { masked_.max_rows = 214748365; }, "args->max_rows: got 214748365");
  refused([&] { masked_.expected_rows = 3; }, "args->expected_rows: got 3, expected 0 to 2");
  refused([&] { masked_.x_dtype = AWQD_INT8; }, "args->x_dtype: got INT8");
  refused([&] { masked_.y_dtype = AWQD_INT32; }, "args->y_dtype: got INT32");
  refused([&] { masked_.activation = AWQD_SITU; }, "args->activation: got situ");
  refused([&] { masked_.quantization = AWQD_FP8_STATIC; }, "args->quantization: got 5");
  refused([&] { masked_.x = nullptr; }, "args->x: got NULL");
  refused([&] { masked_.y = nullptr; }, "args->y: got NULL");
  refused([&] { masked_.counts = nullptr; }, "args->counts: got NULL");
  masked_ = good;
  masked_.max_rows = 0;
  masked_.x = masked_.y = nullptr, masked_.counts = nullptr;
  EXPECT_EQ(MultiplyMasked(), AWQD_OK) << "no rows: " << awqd_error_message();
}

TEST_F(ExpertsTest, RefusesWhatAreNoChoices) {
  std::vector<int32_t> ids(kTokens * kTopK, 0);
  ids[7] = kExperts;
  matmul_.expert_ids = mlp_.expert_ids = ids.data();
  y_.assign(y_.size(), 9);
  ExpectRefused(Multiply(), "args->expert_ids[7]: got 5, expected 0 to 4");
  ids[7] = -1;
  ExpectRefused(RunMlp(), "args->expert_ids[7]: got -1, expected 0 to 4");
  EXPECT_THAT(y_, Each(9)) << "nothing was computed";
  ids[7] = 0;
  const awqd_grouped_matmul_args good = matmul_;
  const auto refused = [&](auto change, const std::string& message) {
    matmul_ = good;
    change();
    ExpectRefused(Multiply(), message);
  };
  refused([&] { matmul_.size = 8; }, "args->size: got 8, expected 72");
  refused([&] { matmul_.m = -1; }, "args->m: got -1");
  refused([&] { matmul_.top_k = 0; }, "args->top_k: got 0, expected at least 1");
  refused([&] { matmul_.top_k = int64_t{1} << 62; }, "args->top_k: got 4611686018427387904");
  refused([&] { matmul_.x_dtype = AWQD_INT8; }, "args->x_dtype: got INT8, expected FP16");
  refused([&] { matmul_.y_dtype = AWQD_INT32; }, "args->y_dtype: got INT32");
  refused([&] { matmul_.activation = AWQD_SITU; }, "args->activation: got situ");
  refused([&] { matmul_.x = nullptr; }, "args->x: got NULL");
  refused([&] { matmul_.y = nullptr; }, "args->y: got NULL");
  refused([&] { matmul_.expert_ids = nullptr; }, "args->expert_ids: got NULL");
  matmul_ = good;
  int64_t bytes = 0;
  ASSERT_EQ(awqd_grouped_matmul_workspace(gate_.get(), &matmul_, &bytes), AWQD_OK);
  Workspace workspace(bytes);
  awqd_workspace small = workspace.get();
  --small.bytes;
  ExpectRefused(awqd_grouped_matmul(gate_.get(), &matmul_, small, nullptr), "workspace.bytes: got");
  ExpectRefused(awqd_grouped_matmul(gate_.get(), &matmul_, {nullptr, bytes}, nullptr),
                "workspace.data: got NULL");
  ExpectRefused(awqd_grouped_matmul(nullptr, &matmul_, workspace.get(), nullptr),
                "stack: got NULL");
  ExpectRefused(awqd_grouped_matmul(gate_.get(), &matmul_, workspace.get(), &bytes),
                "stream: got one");
}

TEST_F(ExpertsTest, RefusesStacksThatDoNotFit) {
  const WeightPtr gate = LoadOne("moe.experts.0.gate_proj"), down = LoadOne("mlp.down_proj");
  awqd_stack* stack = nullptr;
  const awqd_weight* two[] = {gate.get(), down.get()};
  ExpectRefused(awqd_stack_make(two, 2, &stack), "weights[1]: got [96, 72], expected [64, 96]");
  two[1] = nullptr;
  ExpectRefused(awqd_stack_make(two, 2, &stack), "weights[1]: got NULL");
  ExpectRefused(awqd_stack_make(two, 0, &stack), "count: got 0, expected 1 to 10000");
  ExpectRefused(awqd_stack_make(two, 1, nullptr), "stack: got NULL");
  ExpectRefused(awqd_stack_make(nullptr, 1, &stack), "weights: got NULL");
  awqd_device* device = nullptr;
  ASSERT_EQ(awqd_device_open("cpu", nullptr, &device), AWQD_OK);
  const DevicePtr first = std::exchange(device_, DevicePtr(device));
  const WeightPtr elsewhere = LoadOne("moe.experts.1.gate_proj");
  two[1] = elsewhere.get();
  ExpectRefused(awqd_stack_make(two, 2, &stack), "the same awqd_device as weights[0]");
  EXPECT_EQ(stack, nullptr);
  ASSERT_EQ(awqd_stack_make(two, 1, &stack), AWQD_OK) << awqd_error_message();
  const StackPtr single(stack);

  const awqd_grouped_mlp_args good = mlp_;
  mlp_.up = single.get();
  ExpectRefused(RunMlp(), "args->up: got 1 experts, expected 5, as args->gate");
  mlp_ = good;
  mlp_.down = gate_.get();
  ExpectRefused(RunMlp(), "args->down: got [64, 96], expected [96, N]");
  mlp_.down = nullptr;
  ExpectRefused(RunMlp(), "args->down: got NULL");
  mlp_ = good;
  const StackPtr other = Load("moe.experts.", ".up_proj");
  mlp_.up = other.get();
  ExpectRefused(RunMlp(), "args->up: got a stack on cpu, expected one of the same awqd_device");
  mlp_ = good;
  mlp_.activation = 99;
  ExpectRefused(RunMlp(), "args->activation: got 99");
}

}  // namespace
}  // namespace awqd
