// The real server over three CPU devices: replicas and columns answer every call as one device
// does.
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/inference/devices_fixture.h"
#include "tests/e2e/inference/reload_under_calls.h"

namespace awqd {
namespace {

using client::Tensor;
using ::testing::HasSubstr;

constexpr int64_t kK = 128, kN = 328, kGroup = 32;  // 328 cannot be divided evenly by three

Tensor Tokens(int64_t count, float scale = 0.01f) {
  std::vector<float> values(count * kK);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = scale * static_cast<float>(i * 7 % 97) - 0.4f;
  return *Tensor::FromFloats(v1::FP16, {count, kK}, values);
}

class SeveralDevicesE2eTest : public DevicesTest {
 protected:
  void SetUp() override {
    weight_.Write(repository_ / "m");
    StartBoth("cpu:0,cpu:1,cpu:2");
  }

  const SyntheticAwq weight_ = SyntheticAwq::Random(kK, kN, kGroup, 5);
  const client::WeightName name_ = {"m", "layer"};
};

TEST_P(SeveralDevicesE2eTest, TellsWhereWeightsLive) {
  const auto info = client_->GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->shard(), GetParam());
  const auto model = client_->GetModel("m");
  ASSERT_TRUE(model.ok()) << model.status();
  const v1::WeightInfo& weight = model->weights(0);
  EXPECT_EQ(weight.n(), kN);
  EXPECT_EQ(weight.device(), "cpu:0,cpu:1,cpu:2");
  ASSERT_EQ(weight.parts_size(), 3);
  ASSERT_EQ(info->devices_size(), 3);
  int64_t next = 0, bytes = 0;
  for (int i = 0; i < 3; ++i) {
    const v1::WeightPart& part = weight.parts(i);
    EXPECT_EQ(info->devices(i).id(), absl::StrCat("cpu:", i));
    EXPECT_EQ(part.device(), info->devices(i).id());
    EXPECT_EQ(part.bytes(), info->devices(i).weights_bytes());
    EXPECT_EQ(part.column_begin(), columns() ? next : 0);
    next = part.column_end();
    bytes += part.bytes();
  }
  EXPECT_EQ(next, kN);
  EXPECT_EQ(weight.bytes(), bytes);
}

TEST_P(SeveralDevicesE2eTest, ProductsHaveTheBitsOfOneDevice) {
  const Tensor bias = *Tensor::FromFloats(v1::FP32, {kN}, std::vector<float>(kN, 0.75f));
  for (int64_t tokens : {0, 1, 3, 40}) {
    for (bool with_bias : {false, true}) {
      client::MatmulCall call = {.weight = name_, .activations = Tokens(tokens), .path = v1::FUSED};
      if (with_bias) call.bias = bias;
      const auto expected = reference_->QuantizedMatmul(call);
      const auto answer = client_->QuantizedMatmul(call);
      ASSERT_TRUE(expected.ok() && answer.ok()) << expected.status() << answer.status();
      EXPECT_EQ(answer->output.shape, expected->output.shape);
      EXPECT_TRUE(answer->output.bytes == expected->output.bytes) << tokens << " tokens";
      const std::string& device = answer->execution.device();
      if (columns()) {
        EXPECT_EQ(device, "cpu:0,cpu:1,cpu:2");
      } else {
        EXPECT_THAT(device, ::testing::AnyOf("cpu:0", "cpu:1", "cpu:2"));
      }
    }
  }
}

TEST_P(SeveralDevicesE2eTest, BlocksAreExactAcrossBorders) {
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, kN}, {100, 120}, {7, 327}}) {
    const client::DequantizeCall call = {
        .weight = name_, .row_begin = 5, .row_end = 90, .column_begin = begin, .column_end = end};
    const auto answer = client_->Dequantize(call);
    ASSERT_TRUE(answer.ok()) << answer.status();
    std::string streamed;
    const auto execution = client_->DequantizeBlocks(call, [&](client::DequantizeBlock block) {
      streamed += block.values.bytes;
      return absl::OkStatus();
    });
    ASSERT_TRUE(execution.ok()) << execution.status();
    EXPECT_TRUE(streamed == answer->output.bytes);
    const int64_t cols = end - begin;
    ASSERT_EQ(answer->output.bytes.size(), static_cast<size_t>(85 * cols * 2));
    for (int64_t i = 0; i < 85 * cols; ++i) {
      uint16_t bits;
      std::memcpy(&bits, answer->output.bytes.data() + 2 * i, 2);
      ASSERT_EQ(bits, weight_.At(5 + i / cols, begin + i % cols)) << i;
    }
  }
}

TEST_P(SeveralDevicesE2eTest, InlineWeightsAndStreams) {
  const auto named =
      client_->QuantizedMatmul({.weight = name_, .activations = Tokens(2), .path = v1::FUSED});
  const auto carried = client_->QuantizedMatmul(
      {.weight = weight_.ToPacked(), .activations = Tokens(2), .path = v1::FUSED});
  ASSERT_TRUE(named.ok() && carried.ok()) << named.status() << carried.status();
  EXPECT_TRUE(named->output.bytes == carried->output.bytes);
  const auto stream = client_->QuantizedMatmulStream();
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(stream
                    ->Send({.weight = name_,
                            .activations = Tokens(2),
                            .path = v1::FUSED,
                            .request_id = absl::StrCat(i)})
                    .ok());
  }
  ASSERT_TRUE(stream->CloseSend().ok());
  std::map<std::string, int> seen;
  for (auto next = stream->Receive(); next.ok() && next->has_value(); next = stream->Receive()) {
    ASSERT_TRUE((*next)->result.ok()) << (*next)->result.status();
    EXPECT_TRUE((*next)->result->output.bytes == named->output.bytes);
    ++seen[(*next)->request_id];
  }
  EXPECT_EQ(seen.size(), 20u);
}

TEST_P(SeveralDevicesE2eTest, ManyCallersWhileTheModelReloads) {
  const auto expected =
      reference_->QuantizedMatmul({.weight = name_, .activations = Tokens(1), .path = v1::FUSED});
  ASSERT_TRUE(expected.ok()) << expected.status();
  ReloadUnderCalls(*client_, "m", 10, 50, [&] {
    const auto answer =
        client_->QuantizedMatmul({.weight = name_, .activations = Tokens(1), .path = v1::FUSED});
    return answer.ok() && answer->output.bytes == expected->output.bytes;
  });
}

INSTANTIATE_TEST_SUITE_P(Shard, SeveralDevicesE2eTest, ::testing::Values("replicas", "columns"),
                         [](const auto& info) { return info.param; });

TEST(SeveralDevicesFlagsTest, AModelThatFitsOnlyCutIsServedCut) {
  TempFolder repository;
  SyntheticAwq::Random(512, 32768, 128, 1).Write(repository / "m");  // 8 MiB of codes
  const auto args = [&](const std::string& shard) {
    return std::vector<std::string>{"--model_repository=" + repository.path(),
                                    "--device=cpu:0,cpu:1", "--device_memory_limit=8MiB",
                                    "--cpu_threads=1", "--shard=" + shard};
  };
  ServerProcess replicas(args("replicas"));
  const ExitReport failed = replicas.Wait();
  EXPECT_EQ(failed.code, 1);
  EXPECT_THAT(failed.log, HasSubstr("--shard=columns"));
  ServerProcess columns(args("columns"));
  ASSERT_TRUE(columns.WaitServing()) << columns.log();
  EXPECT_TRUE(columns.NewClient()->Dequantize({.weight = client::WeightName{"m", "layer"}}).ok());
  EXPECT_EQ(columns.Stop().code, 0);
}

TEST(SeveralDevicesFlagsTest, BadListsEndTheServer) {
  TempFolder repository;
  for (const auto& [flag, message] :
       {std::pair<std::string, std::string>{"--device=cpu:0,cpu:00",
                                            "expected one spelling for each device"},
        {"--device=cpu:0,gpu", "expected auto, cpu, cpu:N or cuda:N"},
        {"--shard=rows", "--shard"}}) {
    const ExitReport report =
        RunProgram(BinaryPath("awqd"), {"--model_repository=" + repository.path(), flag});
    EXPECT_NE(report.code, 0) << flag;
    EXPECT_THAT(report.log, HasSubstr(message));
  }
}

}  // namespace
}  // namespace awqd
