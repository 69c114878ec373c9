// "modelopt": its settings, its tensors, and every refusal.
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"
#include "tests/testing/reasons.h"

namespace awqd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;

Linear Of(const std::string& algorithm) {
  Linear out = {.format = &kModelOptFormat};
  out.Set("quant_algo", Setting::Typed(algorithm));
  return out;
}

// N = 3, K = 32: the code of (n, k) is (n + k) % 16, group g of column n has scale 2^g, times 3.
Linear MakeNvfp4() {
  Linear out = Of("NVFP4");
  out.Set("group_size", 16);
  out.Add("weight", "U8", {3, 16});
  out.Add("weight_scale", "F8_E4M3", {3, 2});
  out.Add("weight_scale_2", "F32", {});
  for (int i = 0; i < 48; ++i) {
    const int first = i / 16 + i % 16 * 2;
    out.Put<uint8_t>("weight", i, static_cast<uint8_t>(first % 16 | (first + 1) % 16 << 4));
  }
  for (int i = 0; i < 6; ++i) out.Put<uint8_t>("weight_scale", i, i % 2 == 0 ? 0x38 : 0x40);
  out.Put<float>("weight_scale_2", 0, 3);
  return out;
}

// N = 4, K = 4 in groups of 2: code (n * 4 + k) - 8, a scale of the group + 1.
Linear MakeAwq() {
  Linear out = Of("w4a16_awq");
  out.Set("group_size", 2);
  out.Add("weight", "U8", {2, 4});
  out.Add("weight_scale", "F32", {4, 2});
  out.Add("pre_quant_scale", "F32", {4});
  for (int i = 0; i < 8; ++i) {
    const int low = i / 4 * 8 + i % 4 - 8, high = low + 4;
    out.Put<uint8_t>("weight", i, static_cast<uint8_t>((low & 15) | (high & 15) << 4));
  }
  for (int i = 0; i < 8; ++i) out.Put<float>("weight_scale", i, static_cast<float>(i % 2 + 1));
  for (int i = 0; i < 4; ++i) out.Put<float>("pre_quant_scale", i, static_cast<float>(i));
  return out;
}

TEST(ModelOptFormat, Nvfp4) {
  const auto weight = MakeNvfp4().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "e2m1g16+e4m3*t");
  constexpr float kValues[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  for (int k = 0; k < 32; ++k) {
    for (int n = 0; n < 3; ++n) {
      const int code = (n + k) % 16;
      const float value = (code < 8 ? 1.0f : -1.0f) * kValues[code % 8];
      EXPECT_EQ(WeightValue(*weight, k, n), value * (k < 16 ? 1 : 2) * 3);
    }
  }
}

TEST(ModelOptFormat, Int4WithAFactor) {
  Linear linear = MakeAwq();
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w4g2s+fp32");
  EXPECT_THAT(weight->factor, ElementsAre(0, 1, 2, 3));
  for (int k = 0; k < 4; ++k) {
    for (int n = 0; n < 4; ++n) {
      EXPECT_EQ(WeightValue(*weight, k, n), static_cast<float>((n * 4 + k - 8) * (k / 2 + 1)));
    }
  }
  linear.Add("weight_scale", "F16", {4});
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4cs");
}

TEST(ModelOptFormat, EightBits) {
  Linear linear = Of("FP8");
  linear.Add("weight", "F8_E4M3", {2, 64});
  linear.Add("weight_scale", "F32", {});
  EXPECT_EQ(ToString(linear.Decode()->scheme), "e4m3t+fp32");
  linear.Set("quant_algo", Setting::Typed("FP8_PER_CHANNEL_PER_TOKEN"));
  linear.Reshape("weight_scale", {2});
  EXPECT_EQ(ToString(linear.Decode()->scheme), "e4m3c+fp32");
  linear.Set("quant_algo", Setting::Typed("fp8_pb_wo"));
  linear.Reshape("weight_scale", {1, 1, 1, 1});
  EXPECT_EQ(ToString(linear.Decode()->scheme), "e4m3t+fp32");
  linear.Reshape("weight_scale", {1, 2});
  EXPECT_THAT(std::string(linear.Decode().status().message()), HasSubstr("expected [1, 1]"));
  linear.Set("quant_algo", Setting::Typed("mxfp8"));
  linear.Add("weight_scale", "U8", {2, 2});
  EXPECT_EQ(ToString(linear.Decode()->scheme), "e4m3g32+e8m0");
}

// The same weights with other activations, and the codes of the OCP's types.
TEST(ModelOptFormat, OtherAlgorithms) {
  Linear linear = MakeNvfp4();
  linear.Set("quant_algo", Setting::Typed("W4A8_NVFP4_FP8"));
  const auto nvfp4 = MakeNvfp4().Decode(), w4a8 = linear.Decode();
  ASSERT_TRUE(nvfp4.ok() && w4a8.ok()) << w4a8.status();
  EXPECT_EQ(w4a8->codes, nvfp4->codes);
  EXPECT_EQ(w4a8->outer, nvfp4->outer);
  for (const char* name : {"mxfp4", "W4A8_MXFP4_FP8"}) {
    Linear mx = MakeNvfp4();
    mx.settings.members.erase("group_size");
    mx.Set("quant_algo", Setting::Typed(name));
    mx.tensors.erase("weight_scale_2");
    mx.Add("weight_scale", "U8", {3, 1});
    for (int i = 0; i < 3; ++i) mx.Put<uint8_t>("weight_scale", i, static_cast<uint8_t>(126 + i));
    const auto weight = mx.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    EXPECT_EQ(weight->codes, nvfp4->codes);
    EXPECT_EQ(WeightValue(*weight, 0, 2), 2.0f) << "code 2 is 1";
  }
  for (const char* name : {"W8A16", "w8a8_sq_per_channel"}) {
    Linear int8 = Of(name);
    int8.Add("weight", "I8", {2, 3});
    int8.Put<int8_t>("weight", 5, -128);
    int8.Add("weight_scale", "F32", {2});
    int8.Put<float>("weight_scale", 1, 0.5f);
    const auto weight = int8.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(ToString(weight->scheme), "w8cs+fp32");
    EXPECT_EQ(WeightValue(*weight, 2, 1), -64.0f);
  }
}

TEST(ModelOptFormat, Refusals) {
  const std::vector<Refusal> nvfp4 = {
      {"no weight", Without("weight"), {"\"weight\": got nothing, expected U8 [N, K/2]"}},
      {"no scales", Without("weight_scale"), {"\"weight_scale\": got nothing"}},
      {"no outer", Without("weight_scale_2"), {"\"weight_scale_2\": got nothing"}},
      {"dtype", WithDtype("weight", "F8_E4M3"), {"\"weight\": got dtype F8_E4M3, expected U8"}},
      {"short", Short("weight"), {"\"weight\": got 47 bytes"}},
      {"scales' dtype", WithDtype("weight_scale", "F32"), {"\"weight_scale\": got dtype F32"}},
      {"groups", WithShape("weight_scale", {3, 4}), {"got 4 groups, expected 2 (K = 32"}},
      {"columns", WithShape("weight_scale", {2, 2}), {"got shape [2, 2], expected [3, 2]"}},
      {"NaN",
       [](Linear* l) { l->Put<uint8_t>("weight_scale", 3, 0xff); },
       {"got NaN at element 3"}},
      {"outer", WithShape("weight_scale_2", {2}), {"\"weight_scale_2\": got shape [2]"}},
      {"NaN outer",
       [](Linear* l) { l->Put<uint32_t>("weight_scale_2", 0, 0x7fc00000); },
       {"\"weight_scale_2\": got NaN"}},
      {"factor",
       [](Linear* l) { l->Add("pre_quant_scale", "F16", {31}); },
       {"\"pre_quant_scale\": got shape [31], expected [32] (K)"}},
      {"bias", [](Linear* l) { l->Add("bias", "F16", {4}); }, {"\"bias\": got shape [4]"}},
      {"algorithm", With("quant_algo", Setting::Typed("w4a8")), {"quant_algo: got \"w4a8\""}},
      {"group size", With("group_size", 12), {"group_size: got 12, expected -1 or a divisor"}},
  };
  for (const Refusal& refusal : nvfp4) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeNvfp4(), refusal);
  }
  const std::vector<Refusal> awq = {
      {"no scales", Without("weight_scale"), {"\"weight_scale\": got nothing"}},
      {"rows", WithShape("weight_scale", {2, 2}), {"got shape [2, 2], expected [4, groups]"}},
      {"groups", WithShape("weight_scale", {4, 4}), {"got 4 groups, expected 2"}},
      {"scales' dtype", WithDtype("weight_scale", "U8"), {"\"weight_scale\": got dtype U8"}},
      {"two scales", [](Linear* l) { l->Add("weight_scale_2", "F32", {}); }, {"none with"}},
      {"factor",
       [](Linear* l) { l->Put<uint32_t>("pre_quant_scale", 1, 0x7fc00000); },
       {"\"pre_quant_scale\": got NaN"}},
  };
  for (const Refusal& refusal : awq) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeAwq(), refusal);
  }
}

// --- Settings of a checkpoint ---

Setting Object(std::map<std::string, Setting, std::less<>> members) {
  Setting out;
  out.members = std::move(members);
  return out;
}
Setting List(std::vector<Setting> entries) {
  Setting out = {Setting::Kind::kList};
  out.list = std::move(entries);
  return out;
}
Setting Config(Setting algorithm) {
  return Object({{"quant_method", Setting::String("modelopt")}, {"quant_algo", algorithm}});
}

TEST(ModelOptFormat, ReadsBothSpellings) {
  Setting flat = Config(Setting::String("NVFP4"));
  flat.members["ignore"] = List({Setting::String("lm_head"), Setting::String("*.0.self_attn*")});
  auto found = FindFormat(flat);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kModelOptFormat);
  EXPECT_THAT(found->config.left_out,
              ElementsAre(ModulePattern{Kind::kPath, "lm_head"},
                          ModulePattern{Kind::kRegex, ".*\\.0\\.self_attn.*$"}));
  const Setting nested =
      Object({{"quant_method", Setting::String("modelopt")},
              {"quantization", Object({{"quant_algo", Setting::String("W4A16_AWQ")},
                                       {"group_size", Setting::Literal(int64_t{128})},
                                       {"exclude_modules", List({Setting::String("a?b")})}})}});
  found = FindFormat(nested);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT(found->config.left_out, ElementsAre(ModulePattern{Kind::kRegex, "a.b$"}));
  EXPECT_EQ(found->config.rules.at(0).settings.members.at("group_size").text, "128");
}

TEST(ModelOptFormat, MixedPrecision) {
  Setting config = Config(Setting::String("MIXED_PRECISION"));
  config.members["quantized_layers"] =
      Object({{"a", Object({{"quant_algo", Setting::String("FP8")}})},
              {"b", Object({{"quant_algo", Setting::String("NVFP4")}})},
              {"c", Object({{"quant_algo", Setting::String("FP8")}})}});
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->config.rules.size(), 2u);
  EXPECT_THAT(found->config.rules[0].targets,
              ElementsAre(ModulePattern{Kind::kPath, "a"}, ModulePattern{Kind::kPath, "c"}));
  config.members["quantized_layers"].members["b"] =
      Object({{"quant_algo", Setting::String("W4A8_AWQ")}});
  const absl::Status other = testing::FirstReason(FindFormat(config));
  EXPECT_EQ(other.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(other.message()),
              HasSubstr("quantized_layers.b.quant_algo: got \"w4a8_awq\", expected fp8, "));
  config.members.erase("quantized_layers");
  EXPECT_THAT(std::string(FindFormat(config).status().message()),
              HasSubstr("quantized_layers: got nothing"));
}

TEST(ModelOptFormat, RefusesSettings) {
  EXPECT_EQ(FindFormat(Config(Setting::String("W8A8_SQ"))).status().code(),
            absl::StatusCode::kUnimplemented);
  const absl::Status nothing = FindFormat(Config({Setting::Kind::kNull})).status();
  EXPECT_EQ(nothing.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(nothing.message()), HasSubstr("quant_algo: got nothing"));
  Setting config = Config(Setting::String("FP8"));
  config.members["ignore"] = Setting::String("lm_head");
  EXPECT_THAT(std::string(FindFormat(config).status().message()), HasSubstr("ignore: got"));
}

}  // namespace
}  // namespace awqd
