// The assignment of tensors to linears: suffixes with dots or after another separator, and codes of
// three dimensions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/exact.h"
#include "tests/kernels/checkpoint/test_files.h"
#include "tests/testing/reasons.h"

namespace awqd::model {
namespace {

using ::awqd::testing::FirstReason;
using ::awqd::testing::SafetensorsOf;
using ::awqd::testing::TempDirectory;
using ::awqd::testing::TestTensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr absl::string_view kMxfp4Config = R"({"quantization_config": {"quant_method": "mxfp4"}})";
constexpr absl::string_view kFourBits =
    R"({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true}})";

class SuffixesTest : public ::testing::Test {
 protected:
  absl::StatusOr<Checkpoint> Open(const TestTensors& tensors, absl::string_view config) {
    directory_.Write("m/config.json", config);
    directory_.Write("m/model.safetensors", SafetensorsOf(tensors));
    root_ = *RepositoryRoot::Open(directory_.path());
    return Checkpoint::Open(root_, "m");
  }
  void ExpectRefused(const TestTensors& tensors, absl::string_view config,
                     const std::string& says) {
    const absl::Status reason = FirstReason(Open(tensors, config));
    EXPECT_EQ(reason.code(), absl::StatusCode::kInvalidArgument) << says;
    EXPECT_THAT(std::string(reason.message()), HasSubstr(says));
  }

  TempDirectory directory_;
  RepositoryRoot root_ = *RepositoryRoot::Open(directory_.path());
};

// Two experts of N = 2 and K = 32, and tensors that are not quantised.
TestTensors Experts() {
  const std::string path = "model.layers.0.mlp.experts.gate_up_proj";
  return {
      {path + "_blocks", {"U8", {2, 2, 1, 16}, std::string(32, '\x22') + std::string(32, '\x44')}},
      {path + "_scales", {"U8", {2, 2, 1}, std::string(4, '\x7f')}},
      {path + "_bias", {"BF16", {2, 2}, std::string(8, 0)}},
      {"model.layers.0.self_attn.q_proj.bias", {"BF16", {1}, "ab"}},
      {"model.layers.0.other_bias", {"BF16", {1}, "ab"}},
      {"_blocks.weight", {"U8", {1}, "a"}}};
}

// bnb_4bit_quant_storage: the bytes of the codes, as a tensor of another type.
TEST_F(SuffixesTest, CodesStoredAsAnotherType) {
  const std::string state = R"({"quant_type":"nf4","blocksize":64,"shape":[2,64]})";
  for (const auto& [dtype, size] :
       {std::pair{"U8", 1}, {"I8", 1}, {"BF16", 2}, {"F16", 2}, {"F32", 4}, {"F64", 8}}) {
    SCOPED_TRACE(dtype);
    const auto checkpoint = Open({{"a.weight", {dtype, {64 / size, 1}, std::string(64, '\x21')}},
                                  {"a.weight.absmax", {"F32", {2}, std::string(8, 0)}},
                                  {"a.weight.quant_map", {"F32", {16}, std::string(64, 0)}},
                                  {"a.weight.quant_state.bitsandbytes__nf4",
                                   {"U8", {static_cast<int64_t>(state.size())}, state}},
                                  {"b.weight", {"BF16", {2, 1}, "abcd"}}},
                                 kFourBits);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ASSERT_EQ(checkpoint->linears().size(), 1u);
    EXPECT_EQ(checkpoint->ignored_tensors(), 1);
    std::vector<uint8_t> scratch;
    const auto weight = checkpoint->Read(checkpoint->linears()[0], &scratch);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->Code(0, 0), 2);
    EXPECT_EQ(weight->Code(1, 1), 1);
  }
}

TEST_F(SuffixesTest, AfterAnotherSeparatorAndOfAllExperts) {
  const auto checkpoint = Open(Experts(), kMxfp4Config);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->ignored_tensors(), 3);
  std::vector<std::string> paths;
  std::vector<float> scales;
  std::vector<uint8_t> scratch;
  for (const LinearLocation& linear : checkpoint->linears()) {
    paths.push_back(linear.path);
    const auto weight = checkpoint->Read(linear, &scratch);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->n, 2);
    EXPECT_EQ(weight->k, 32);
    EXPECT_EQ(weight->bias.size(), 2u);
    scales.push_back(static_cast<float>(weight->Code(31, 1)));
  }
  EXPECT_THAT(paths, ElementsAre("model.layers.0.mlp.experts.0.gate_up_proj",
                                 "model.layers.0.mlp.experts.1.gate_up_proj"));
  EXPECT_THAT(scales, ElementsAre(2, 4));
}

TEST_F(SuffixesTest, WhatIsMissingOfExperts) {
  const std::string path = "model.layers.0.mlp.experts.gate_up_proj";
  TestTensors tensors = Experts();
  tensors.erase(path + "_scales");
  ExpectRefused(tensors, kMxfp4Config,
                absl::StrCat("weight \"", path, "\": tensor \"scales\" is missing"));
  tensors = Experts();
  tensors.erase(path + "_blocks");
  ExpectRefused(tensors, kMxfp4Config,
                absl::StrCat("weight \"", path, "\": tensor \"blocks\" is missing"));
  tensors = Experts();
  tensors[path + "_scales"].shape = {1, 4, 1};
  ExpectRefused(tensors, kMxfp4Config,
                "\"scales\": shape: got [1, 4, 1] of U8, expected 2 experts");
  tensors = Experts();
  tensors[path + "_blocks"].shape = {4, 1, 16};  // the dimensions of one linear
  tensors[path + "_scales"].shape = {4, 1};
  tensors[path + "_bias"].shape = {4};
  const auto one = Open(tensors, kMxfp4Config);
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->linears().at(0).path, path);
}

// K = 64, N = 1, and a linear that is not quantised.
TestTensors FourBits() {
  const std::string state = R"({"blocksize": 64, "shape": [1, 64]})";
  return {{"l.up.weight", {"U8", {32, 1}, std::string(32, '\x12')}},
          {"l.up.weight.absmax", {"F32", {1}, std::string("\0\0\x80\x3f", 4)}},
          {"l.up.weight.quant_map", {"F32", {16}, std::string(64, '\x3f')}},
          {"l.up.weight.quant_state.bitsandbytes__nf4",
           {"U8", {static_cast<int64_t>(state.size())}, state}},
          {"l.up.bias", {"F16", {1}, "ab"}},
          {"l.gate.weight", {"F16", {1, 1}, "ab"}}};
}

TEST_F(SuffixesTest, WithDots) {
  const auto checkpoint = Open(FourBits(), kFourBits);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ(checkpoint->linears().size(), 1u);
  const LinearLocation& linear = checkpoint->linears()[0];
  EXPECT_EQ(linear.path, "l.up");
  EXPECT_EQ(linear.tensors.size(), 5u);
  std::vector<uint8_t> scratch;
  const auto weight = checkpoint->Read(linear, &scratch);
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->Code(0, 0), 1);
  TestTensors tensors = FourBits();
  tensors.erase("l.up.weight.absmax");
  ExpectRefused(tensors, kFourBits, "weight \"l.up\": tensor \"weight.absmax\" is missing");
  tensors = FourBits();
  tensors["l.up.weight"].dtype = "BOOL";
  ExpectRefused(tensors, kFourBits, "tensor \"weight\" is \"BOOL\", not U8, but \"weight.absmax");
}

// Scales of fused projections, each with its own: config.json tells how many rows q, k and v have.
TEST_F(SuffixesTest, ScalesOfFusedProjections) {
  const std::string scales("\0\0\x80\x3f\0\0\0\x40\0\0\x80\x40", 12);  // 1, 2, 4
  const auto fp8 = [&](const std::string& path, int64_t n, int64_t count) {
    return TestTensors{{path + ".weight", {"F8_E4M3", {n, 2}, std::string(2 * n, '\x38')}},
                       {path + ".weight_scale", {"F32", {count}, scales.substr(0, 4 * count)}}};
  };
  TestTensors tensors = fp8("l.self_attn.qkv_proj", 8, 3);
  tensors.merge(fp8("l.mlp.gate_up_proj", 6, 2));
  tensors.merge(fp8("l.mlp.other_proj", 6, 2));
  constexpr absl::string_view kHeads =
      R"({"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 4,
          "quantization_config": {"quant_method": "fp8"}})";
  const auto checkpoint = Open(tensors, kHeads);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<uint8_t> scratch;
  std::map<std::string, std::vector<float>> first_rows;
  for (const LinearLocation& linear : checkpoint->linears()) {
    const auto weight = checkpoint->Read(linear, &scratch);
    if (!weight.ok()) {
      EXPECT_EQ(linear.path, "l.mlp.other_proj");
      EXPECT_THAT(std::string(weight.status().message()), HasSubstr("got shape [2]"));
      continue;
    }
    for (int64_t n = 0; n < weight->n; ++n) {
      first_rows[linear.path].push_back(WeightValue(*weight, 0, n));
    }
  }
  EXPECT_THAT(first_rows, UnorderedElementsAre(
                              Pair("l.mlp.gate_up_proj", ElementsAre(1, 1, 1, 2, 2, 2)),
                              Pair("l.self_attn.qkv_proj", ElementsAre(1, 1, 1, 1, 2, 2, 4, 4))));
  const auto untold = Open(tensors, R"({"quantization_config": {"quant_method": "fp8"}})");
  ASSERT_TRUE(untold.ok()) << untold.status();
  for (const LinearLocation& linear : untold->linears()) {
    if (linear.path != "l.self_attn.qkv_proj") continue;
    EXPECT_THAT(std::string(untold->Read(linear, &scratch).status().message()),
                HasSubstr("one for each of the fused projections where config.json tells"));
  }
}

TEST_F(SuffixesTest, ModelOptsSettingsInAFileOfTheirOwn) {
  const TestTensors tensors = {{"l.up.weight", {"F8_E4M3", {1, 2}, "ab"}},
                               {"l.up.weight_scale", {"F32", {}, "abc1"}},
                               {"l.up.input_scale", {"F32", {}, "abc1"}},
                               {"lm_head.weight", {"F16", {1, 1}, "ab"}}};
  ExpectRefused(tensors, "{}", "quantize_config.json or hf_quant_config.json beside it");
  directory_.Write("m/hf_quant_config.json",
                   R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})");
  const auto checkpoint = Open(tensors, "{}");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->format().name, "modelopt");
  EXPECT_EQ(checkpoint->linears().size(), 1u);
  EXPECT_EQ(checkpoint->ignored_tensors(), 1);
}

}  // namespace
}  // namespace awqd::model
