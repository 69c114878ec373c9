// "fp8": its settings, its tensors, and every refusal.
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;

// N = 3, K = 5 in blocks of 2 x 2 (of N x K): every code 1.0, and block [i, j] has scale 3 i + j
// + 1.
Linear MakeLinear() {
  Linear out = {.format = &kFp8Format};
  out.Set("block_n", 2);
  out.Set("block_k", 2);
  out.Add("weight", "F8_E4M3", {3, 5});
  out.Add("weight_scale_inv", "F32", {2, 3});
  for (int i = 0; i < 15; ++i) out.Put<uint8_t>("weight", i, 0x38);
  for (int i = 0; i < 6; ++i) out.Put<float>("weight_scale_inv", i, static_cast<float>(i + 1));
  return out;
}

Linear WithoutBlocks(const std::string& dtype, std::vector<int64_t> shape) {
  Linear out = MakeLinear();
  out.settings = {};
  out.tensors.erase("weight_scale_inv");
  out.Add("weight_scale", dtype, std::move(shape));
  return out;
}

TEST(Fp8Format, Blocks) {
  const auto weight = MakeLinear().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "e4m3b2x2+fp32");
  for (int k = 0; k < 5; ++k) {
    for (int n = 0; n < 3; ++n) {
      EXPECT_EQ(WeightValue(*weight, k, n), static_cast<float>(3 * (n / 2) + k / 2 + 1));
    }
  }
}

TEST(Fp8Format, BlocksLargerThanTheMatrix) {
  Linear linear = MakeLinear();
  linear.Set("block_n", 128);
  linear.Set("block_k", 128);
  linear.Add("weight_scale_inv", "F8_E8M0", {1, 1});
  linear.Put<uint8_t>("weight_scale_inv", 0, 129);
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "e4m3t+e8m0");
  EXPECT_EQ(WeightValue(*weight, 4, 2), 4.0f);
  linear.Add("weight", "U8", {1, 5});
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "e4m3c+e8m0");
}

// DeepSeek-V4's name of the scales, and its experts beside FP8 in blocks.
TEST(Fp8Format, ScaleAndExpertsOfMxfp4) {
  Linear linear = MakeLinear();
  linear.tensors["scale"] = linear.tensors["weight_scale_inv"];
  linear.tensors.erase("weight_scale_inv");
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "e4m3b2x2+fp32");
  EXPECT_EQ(WeightValue(*weight, 4, 2), 6.0f);
  linear.Add("weight", "I8", {2, 32});
  linear.Add("scale", "F8_E8M0", {2, 2});
  linear.Put<uint8_t>("weight", 32 + 16, 0x7a);  // of column 1: rows 32 and 33 are -1 and 6
  linear.Put<uint8_t>("scale", 3, 128);
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "e2m1g32+e8m0");
  EXPECT_EQ(WeightValue(*weight, 32, 1), -2.0f);
  EXPECT_EQ(WeightValue(*weight, 33, 1), 12.0f);
  linear.Add("scale", "F32", {2, 2});
  EXPECT_THAT(std::string(linear.Decode().status().message()),
              HasSubstr("\"scale\": got dtype F32, expected F8_E8M0 or U8"));
}

TEST(Fp8Format, OneForAllAndOnePerColumn) {
  using Shape = std::vector<int64_t>;
  for (const auto& [shape, scheme] : std::vector<std::pair<Shape, std::string>>{
           {{}, "e4m3t+bf16"}, {{1}, "e4m3t+bf16"}, {{3}, "e4m3c+bf16"}, {{3, 1}, "e4m3c+bf16"}}) {
    const auto weight = WithoutBlocks("BF16", shape).Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    EXPECT_EQ(ToString(weight->scheme), scheme);
  }
  const auto other = WithoutBlocks("F32", {2}).Decode();
  EXPECT_THAT(std::string(other.status().message()),
              HasSubstr("\"weight_scale\": got shape [2], expected [], [1], [3] or [3, 1] (N)"));
}

// One scale for each of the projections that the codes are fused of, here of two and of one row.
TEST(Fp8Format, OneForEachFusedProjection) {
  Linear linear = WithoutBlocks("F32", {2, 1});
  linear.Put<float>("weight_scale", 0, 2.0f);
  linear.Put<float>("weight_scale", 1, 4.0f);
  LinearTensors views = linear.Views();
  EXPECT_FALSE(kFp8Format.Decode(linear.settings, views).ok());
  views.at("weight").fused = {{2, 1}};
  const auto weight = kFp8Format.Decode(linear.settings, views);
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "e4m3c+fp32");
  for (int n = 0; n < 3; ++n) EXPECT_EQ(WeightValue(*weight, 4, n), n < 2 ? 2.0f : 4.0f);
}

// Blocks of 2 x 2 that begin anew with each projection, of 3, 1 and 1 rows: 0-1, 2, 3, 4.
TEST(Fp8Format, BlocksOfFusedProjections) {
  Linear linear = MakeLinear();
  linear.Add("weight", "F8_E4M3", {5, 5});
  linear.Add("weight_scale_inv", "F32", {4, 3});
  for (int i = 0; i < 25; ++i) linear.Put<uint8_t>("weight", i, 0x38);
  for (int i = 0; i < 12; ++i) linear.Put<float>("weight_scale_inv", i, static_cast<float>(i + 1));
  LinearTensors views = linear.Views();
  const auto decode = [&] { return kFp8Format.Decode(linear.settings, views); };
  EXPECT_THAT(std::string(decode().status().message()), HasSubstr("got shape [4, 3]"));
  views.at("weight").fused = {{3, 1, 1}};
  const auto weight = decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  constexpr int kBlock[] = {0, 0, 1, 2, 3};
  for (int k = 0; k < 5; ++k) {
    for (int n = 0; n < 5; ++n) {
      EXPECT_EQ(WeightValue(*weight, k, n), static_cast<float>(3 * kBlock[n] + k / 2 + 1));
    }
  }
  views.at("weight").fused = {{3, 1, 1}, {1, 3, 1}};  // both have four blocks
  EXPECT_THAT(std::string(decode().status().message()),
              HasSubstr("expected blocks that fit one way of fusing projections, not several"));
}

TEST(Fp8Format, EveryCode) {
  Linear linear = WithoutBlocks("F32", {});
  linear.Put<float>("weight_scale", 0, 1.0f);
  linear.Add("weight", "F8_E4M3", {256, 1});
  for (int i = 0; i < 256; ++i) linear.Put<uint8_t>("weight", i, static_cast<uint8_t>(i));
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  for (int i = 0; i < 256; ++i) EXPECT_EQ(weight->Code(0, i), i);
  EXPECT_EQ(WeightValue(*weight, 0, 0x7e), 448.0f);
}

class Fp8Refusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(Fp8Refusal, NamesThePart) { ExpectRefused(MakeLinear(), GetParam()); }

std::vector<Refusal> Refusals() {
  return {
      {"WeightMissing", Without("weight"), {"\"weight\": got nothing, expected F8_E4M3 [N, K]"}},
      {"ScaleMissing", Without("weight_scale_inv"), {"\"weight_scale\": got nothing"}},
      {"WeightDtype", WithDtype("weight", "I16"), {"\"weight\": got dtype I16"}},
      {"WeightRank", WithShape("weight", {15}), {"\"weight\": got shape [15], expected rank 2"}},
      {"WeightEmpty", WithShape("weight", {0, 5}), {"dimensions of at least 1"}},
      {"WeightShort", Short("weight"), {"\"weight\": got 14 bytes, expected 15"}},
      {"WeightHuge",
       [](Linear* l) {
         l->tensors["weight"].shape = {int64_t{1} << 62, int64_t{1} << 62};
       },
       {"below 2^63 bytes"}},
      {"ScaleDtype", WithDtype("weight_scale_inv", "I32"), {"got dtype I32"}},
      {"ScaleShape",
       WithShape("weight_scale_inv", {3, 2}),
       {"got shape [3, 2], expected [2, 3] ([N, K] in blocks of 2 x 2)"}},
      {"ScaleRank", WithShape("weight_scale_inv", {6}), {"got shape [6], expected [2, 3]"}},
      {"ScaleShort", Short("weight_scale_inv"), {"got 23 bytes, expected 24"}},
      {"ScaleIsNan",
       [](Linear* l) { l->Put<uint32_t>("weight_scale_inv", 4, 0x7fc00000); },
       {"\"weight_scale_inv\": got NaN at element 4"}},
      {"PowerIsNan",
       [](Linear* l) {
         l->Add("weight_scale_inv", "F8_E8M0", {2, 3});
         l->Put<uint8_t>("weight_scale_inv", 1, 0xff);
       },
       {"got NaN at element 1"}},
      {"TwoScales",
       [](Linear* l) { l->Add("weight_scale", "F32", {1}); },
       {"\"weight_scale\": got it beside \"weight_scale_inv\", expected only one"}},
      {"OneSide",
       [](Linear* l) { l->settings.members.erase("block_n"); },
       {"block_n: got nothing"}},
      {"SideOfZero", With("block_k", 0), {"block_k: got 0"}},
      {"BiasShape", [](Linear* l) { l->Add("bias", "F16", {4}); }, {"\"bias\": got shape [4]"}},
  };
}

INSTANTIATE_TEST_SUITE_P(All, Fp8Refusal, ::testing::ValuesIn(Refusals()),
                         [](const auto& info) { return info.param.name; });

Setting Config() {
  Setting out;
  out.members["quant_method"] = Setting::String("fp8");
  out.members["activation_scheme"] = Setting::String("dynamic");
  Setting& size = out.members["weight_block_size"];
  size.kind = Setting::Kind::kList;
  size.list = {Setting::Literal(int64_t{128}), Setting::Literal(int64_t{64})};
  return out;
}

TEST(Fp8Format, ReadsSettings) {
  Setting config = Config();
  for (const char* name : {"modules_to_not_convert", "ignored_layers"}) {
    config.members[name].kind = Setting::Kind::kList;
    config.members[name].list = {Setting::String(name)};
  }
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kFp8Format);
  EXPECT_EQ(found->config.note, "");
  EXPECT_THAT(found->config.left_out,
              ElementsAre(ModulePattern{Kind::kContains, "modules_to_not_convert"},
                          ModulePattern{Kind::kContains, "ignored_layers"}));
  const Setting& rule = found->config.rules.at(0).settings;
  EXPECT_EQ(rule.members.at("block_n").text, "128");
  EXPECT_EQ(rule.members.at("block_k").text, "64");
  EXPECT_EQ(rule.members.at("activations").text, "dynamic");
  config.members["activation_scheme"] = Setting::String("per_cluster");
  EXPECT_THAT(FindFormat(config)->config.note, HasSubstr("activation_scheme has no effect"));
}

TEST(Fp8Format, DeclaredActivations) {
  using enum ActivationQuantization;
  Linear linear = MakeLinear();
  const auto declared = [&] {
    const auto weight = linear.Decode();
    EXPECT_TRUE(weight.ok()) << weight.status();
    return weight.ok() ? weight->activations : DeclaredActivations{};
  };
  EXPECT_EQ(declared().how, kNone);
  linear.Set("activations", Setting::Typed("static"));
  EXPECT_EQ(declared().how, kNone) << "there is no scale";
  linear.Add("input_scale", "F32", {});
  linear.Put<float>("input_scale", 0, 0.25f);
  EXPECT_EQ(declared().how, kFloat8Static);
  EXPECT_EQ(declared().scale, 0.25f);
  linear.Put<float>("input_scale", 0, -1);
  EXPECT_THAT(std::string(linear.Decode().status().message()),
              HasSubstr("\"input_scale\": got -1, expected a positive number"));
  linear.Set("activations", Setting::Typed("sometimes"));
  EXPECT_THAT(std::string(linear.Decode().status().message()),
              HasSubstr("activations: got \"sometimes\""));
}

TEST(Fp8Format, RefusesSettings) {
  const auto expect = [](const char* name, Setting value, absl::StatusCode code,
                         const std::string& says) {
    Setting config = Config();
    config.members[name] = std::move(value);
    const absl::Status status = FindFormat(config).status();
    EXPECT_EQ(status.code(), code) << says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kOther = absl::StatusCode::kUnimplemented;
  expect("weight_block_size", Setting::Literal(int64_t{128}), kInvalid,
         "weight_block_size: got 128, expected null or a list of two numbers");
  Setting zero = Config().members["weight_block_size"];
  zero.list[1] = Setting::Literal(int64_t{0});
  expect("weight_block_size", zero, kInvalid, "weight_block_size: got");
  expect("fmt", Setting::String("e5m2"), kOther, "fmt: got \"e5m2\", expected \"e4m3\"");
  expect("expert_dtype", Setting::String("nvfp4"), kOther,
         "expert_dtype: got \"nvfp4\", expected \"fp8\" or \"fp4\"");
}

// FBGEMM's settings, which say nothing of scales: a tensor [N, 1] has them.
TEST(Fp8Format, ReadsSettingsOfFbgemm) {
  Setting config;
  config.members["quant_method"] = Setting::String("fbgemm_fp8");
  config.members["activation_scale_ub"] = Setting::Typed("1200.0");
  config.members["modules_to_not_convert"].kind = Setting::Kind::kList;
  config.members["modules_to_not_convert"].list = {Setting::String("lm_head")};
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kFp8Format);
  EXPECT_EQ(found->quant_method, "fbgemm_fp8");
  EXPECT_THAT(found->config.left_out, ElementsAre(ModulePattern{Kind::kContains, "lm_head"}));
  EXPECT_EQ(found->config.rules.at(0).settings.members.at("activations").text, "dynamic");
}

// --- blockwise-int8 ---

Linear MakeInt8() {
  Linear out = MakeLinear();
  out.format = &kBlockwiseInt8Format;
  out.Add("weight", "I8", {3, 5});
  for (int i = 0; i < 15; ++i) out.Put<int8_t>("weight", i, static_cast<int8_t>(i * 17 - 128));
  return out;
}

TEST(BlockwiseInt8Format, Blocks) {
  const auto weight = MakeInt8().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w8b2x2s+fp32");
  for (int k = 0; k < 5; ++k) {
    for (int n = 0; n < 3; ++n) {
      const auto scale = static_cast<float>(3 * (n / 2) + k / 2 + 1);
      EXPECT_EQ(WeightValue(*weight, k, n), scale * static_cast<float>((5 * n + k) * 17 - 128));
    }
  }
}

class BlockwiseInt8Refusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(BlockwiseInt8Refusal, NamesThePart) { ExpectRefused(MakeInt8(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    All, BlockwiseInt8Refusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"WeightMissing", Without("weight"), {"\"weight\": got nothing, expected I8 [N, K]"}},
        {"ScaleMissing", Without("weight_scale_inv"), {"\"weight_scale_inv\": got nothing"}},
        {"WeightDtype", WithDtype("weight", "U8"), {"\"weight\": got dtype U8, expected I8"}},
        {"ScaleDtype", WithDtype("weight_scale_inv", "I32"), {"got dtype I32"}},
        {"ScaleShape",
         WithShape("weight_scale_inv", {3, 2}),
         {"got shape [3, 2], expected [2, 3] ([N, K] in blocks of 2 x 2)"}},
        {"OneSide",
         [](Linear* l) { l->settings.members.erase("block_k"); },
         {"block_k: got nothing"}}}),
    [](const auto& info) { return info.param.name; });

TEST(BlockwiseInt8Format, ReadsSettings) {
  Setting config = Config();
  config.members["quant_method"] = Setting::String("blockwise_int8");
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kBlockwiseInt8Format);
  EXPECT_EQ(found->config.rules.at(0).settings.members.at("block_n").text, "128");
  EXPECT_THAT(found->config.note, HasSubstr("activation_scheme has no effect"));
  config.members.erase("weight_block_size");
  EXPECT_THAT(std::string(FindFormat(config).status().message()),
              HasSubstr("weight_block_size: got nothing, expected a list of two numbers"));
}

}  // namespace
}  // namespace awqd
