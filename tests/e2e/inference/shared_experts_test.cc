// The real server over three CPU devices, one of which is listed twice: mixtures of experts and
// gated MLPs, expert parallel and tensor parallel, answer as one device does.
#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/inference/devices_fixture.h"
#include "tests/e2e/inference/reload_under_calls.h"
#include "tests/kernels/checkpoint/test_files.h"

namespace awqd {
namespace {

using client::GatedMlpCall;
using client::GroupedMatmulCall;
using client::Routing;
using client::Tensor;
using client::WeightName;
using ::testing::HasSubstr;

constexpr int64_t kExperts = 5, kK = 128, kMiddle = 384, kN = 64, kTokens = 9, kTopK = 3;

// An AWQ linear of random codes and zeros.
testing::TestTensors RandomLinear(const std::string& path, int64_t k, int64_t n, uint32_t seed) {
  testing::TestTensors out = testing::AwqLinear(path, k, n, 32);
  std::mt19937 random(seed);
  for (const char* part : {".qweight", ".qzeros"}) {
    for (char& byte : out[path + part].bytes) byte = static_cast<char>(random());
  }
  return out;
}

testing::TestTensors Mlp(const std::string& path, uint32_t seed) {
  using testing::Merge;
  return Merge(RandomLinear(path + ".gate_proj", kK, kMiddle, seed),
               Merge(RandomLinear(path + ".up_proj", kK, kMiddle, seed + 1),
                     RandomLinear(path + ".down_proj", kMiddle, kN, seed + 2)));
}

class SharedExpertsE2eTest : public DevicesTest {
 protected:
  void SetUp() override {
    testing::TestTensors tensors = Mlp("mlp", 1);
    for (int e = 0; e < kExperts; ++e) {
      tensors = testing::Merge(tensors, Mlp(absl::StrCat("moe.experts.", e), 10 * (e + 1)));
    }
    std::filesystem::create_directory(repository_ / "moe");
    std::ofstream(repository_ / "moe/config.json") << testing::AwqConfig();
    std::ofstream(repository_ / "moe/model.safetensors") << testing::SafetensorsOf(tensors);
    StartBoth("cpu,cpu,cpu:7");
  }

  static Tensor X() {
    std::vector<float> values;
    for (int64_t i = 0; i < kTokens * kK; ++i) {
      values.push_back(0.02f * static_cast<float>(i * 7 % 97) - 0.9f);
    }
    return *Tensor::FromFloats(v1::FP16, {kTokens, kK}, values);
  }
  static Routing Routed(bool summed) {
    Tensor ids = {v1::INT32, {kTokens, kTopK}, std::string(kTokens * kTopK * 4, '\0')};
    std::vector<float> weights;
    for (int64_t i = 0; i < kTokens * kTopK; ++i) {
      ids.bytes[4 * i] = static_cast<char>(i * 3 % kExperts);
      weights.push_back(0.1f * static_cast<float>(1 + i % 7));
    }
    Routing out = {ids};
    if (summed) out.router_weights = *Tensor::FromFloats(v1::FP32, {kTokens, kTopK}, weights);
    return out;
  }
  static v1::GatedMlpRef Path(const std::string& path) {
    v1::GatedMlpRef out;
    out.set_model("moe");
    out.set_path(path);
    return out;
  }
  static GroupedMatmulCall Grouped(const std::string& projection, const Tensor& x, bool summed) {
    return {.stack = WeightName{"moe", "moe.experts.*." + projection},
            .activations = x,
            .routing = Routed(summed),
            .activation_function = v1::SILU};
  }

  // The same bits; or where K is cut, another order of FP32 sums before one rounding to FP16.
  static void ExpectSame(const absl::StatusOr<client::MatmulResult>& got,
                         const absl::StatusOr<client::MatmulResult>& want, bool near) {
    ASSERT_TRUE(got.ok() && want.ok()) << got.status() << want.status();
    EXPECT_EQ(got->output.shape, want->output.shape);
    if (!near) {
      EXPECT_TRUE(got->output.bytes == want->output.bytes);
      return;
    }
    const std::vector<float> expected = *want->output.ToFloats();
    EXPECT_LE(RelativeError(got->output, {expected.begin(), expected.end()}), 0x1p-11);
  }
};

TEST_P(SharedExpertsE2eTest, AnswersAreThoseOfOneDevice) {
  for (bool summed : {false, true}) {
    const GroupedMatmulCall gate = Grouped("gate_proj", X(), summed);
    ExpectSame(client_->GroupedQuantizedMatmul(gate), reference_->GroupedQuantizedMatmul(gate),
               false);
    const GatedMlpCall mlp = {
        .mlp = Path("moe.experts.*"), .activations = X(), .routing = Routed(summed)};
    const auto shared = client_->GatedMlp(mlp);
    ExpectSame(shared, reference_->GatedMlp(mlp), columns());
    if (GetParam() != "replicas") {
      EXPECT_EQ(shared->execution.device(), "cpu,cpu#2,cpu:7");
    }
  }
  const GatedMlpCall dense = {.mlp = Path("mlp"), .activations = X()};
  ExpectSame(client_->GatedMlp(dense), reference_->GatedMlp(dense), columns());
  const client::DequantizeCall block = {
      .weight = WeightName{"moe", "mlp.down_proj"}, .row_begin = 100, .row_end = 300};
  const auto got = client_->Dequantize(block), want = reference_->Dequantize(block);
  ASSERT_TRUE(got.ok() && want.ok()) << got.status() << want.status();
  EXPECT_TRUE(got->output.bytes == want->output.bytes);
}

TEST_P(SharedExpertsE2eTest, TellsWhereWeightsLive) {
  const auto info = client_->GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->shard(), GetParam());
  ASSERT_EQ(info->devices_size(), 3);
  EXPECT_EQ(info->devices(1).id(), "cpu#2");
  const auto model = client_->GetModel("moe");
  ASSERT_TRUE(model.ok()) << model.status();
  for (const v1::StackInfo& stack : model->stacks()) {
    EXPECT_EQ(stack.device(), "cpu,cpu#2,cpu:7") << stack.path();
  }
  for (const v1::WeightInfo& weight : model->weights()) {
    const v1::WeightPart& last = *weight.parts().rbegin();
    if (weight.path() == "moe.experts.4.gate_proj" && GetParam() == "experts") {
      EXPECT_EQ(weight.device(), "cpu#2");
    } else if (weight.path() == "mlp.down_proj") {
      EXPECT_EQ(weight.parts_size(), 3);
      EXPECT_EQ(last.column_end() - last.column_begin(), kN);
      EXPECT_EQ(last.row_begin(), columns() ? 256 : 0);
      EXPECT_EQ(last.row_end(), kMiddle);
    }
  }
}

TEST_P(SharedExpertsE2eTest, ManyCallersWhileTheModelReloads) {
  const GatedMlpCall mlp = {
      .mlp = Path("moe.experts.*"), .activations = X(), .routing = Routed(true)};
  const auto expected = client_->GatedMlp(mlp);
  ASSERT_TRUE(expected.ok()) << expected.status();
  ReloadUnderCalls(*client_, "moe", 3, 30, [&] {
    const auto answer = client_->GatedMlp(mlp);
    return answer.ok() && answer->output.bytes == expected->output.bytes;
  });
}

INSTANTIATE_TEST_SUITE_P(Shard, SharedExpertsE2eTest,
                         ::testing::Values("replicas", "columns", "experts"),
                         [](const auto& info) { return info.param; });

// The mixture exceeds the limit of one device, but fits on two.
TEST(SharedExpertsLimitTest, AMixtureThatFitsOnlySpread) {
  testing::TempDirectory folder;
  testing::TestTensors tensors;
  for (int e = 0; e < 16; ++e) {  // 1 MiB of codes each
    tensors = testing::Merge(
        tensors, RandomLinear(absl::StrCat("m.experts.", e, ".up_proj"), 1024, 2048, e));
  }
  folder.Write("m/config.json", testing::AwqConfig());
  folder.Write("m/model.safetensors", testing::SafetensorsOf(tensors));
  const auto args = [&](const std::string& shard) {
    return std::vector<std::string>{"--model_repository=" + folder.path(), "--device=cpu,cpu",
                                    "--device_memory_limit=16MiB", "--cpu_threads=1",
                                    "--shard=" + shard};
  };
  ServerProcess replicas(args("replicas"));
  EXPECT_EQ(replicas.Wait().code, 1);
  ServerProcess experts(args("experts"));
  ASSERT_TRUE(experts.WaitServing()) << experts.log();
  EXPECT_EQ(experts.Stop().code, 0);
}

}  // namespace
}  // namespace awqd
