// "quark": its settings, its tensors, and every refusal.
#include <bit>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;
using Members = std::map<std::string, Setting, std::less<>>;

Setting Object(Members members) {
  Setting out;
  out.members = std::move(members);
  return out;
}

Setting Word(const std::string& text) { return Setting::String(text); }

// --- Tensors ---

// N = 8, K = 4, groups of 2; scales are 1.
Linear MakeInt4(const std::string& dtype) {
  Linear out = {.format = &kQuarkFormat};
  out.Set("dtype", Word(dtype));
  out.Set("group_size", 2);
  out.Add("weight", "I32", {4, 1});
  out.Add("weight_scale", "BF16", {2, 8});
  out.Add("weight_zero_point", "I32", {2, 1});
  for (int i = 0; i < 16; ++i) out.Put<uint16_t>("weight_scale", i, 0x3f80);
  return out;
}

TEST(QuarkFormat, FourBitsLieInAutoAwqsOrder) {
  Linear linear = MakeInt4("uint4");
  linear.Put<uint32_t>("weight", 3, 0xf0000010);             // nibble 1 is column 2, 7 is column 7
  linear.Put<uint32_t>("weight_zero_point", 1, 0x20000000);  // of group 1, column 7
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w4g2z+bf16");
  EXPECT_EQ(WeightValue(*weight, 3, 2), 1.0f);
  EXPECT_EQ(WeightValue(*weight, 3, 7), 13.0f);
  linear.Set("dtype", Word("int4"));  // the same bits in two's complement
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(WeightValue(*weight, 3, 2), 1.0f);
  EXPECT_EQ(WeightValue(*weight, 3, 7), -3.0f);
}

TEST(QuarkFormat, SymmetricZerosMayBeStoredOrNot) {
  Linear linear = MakeInt4("int4");
  linear.Put<uint32_t>("weight", 0, 0x00000008);
  for (int stored = 1; stored >= 0; --stored) {
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    EXPECT_EQ(ToString(weight->scheme), "w4g2s+bf16");
    EXPECT_EQ(WeightValue(*weight, 0, 0), -8.0f);
    EXPECT_EQ(WeightValue(*weight, 1, 0), 0.0f);
    linear.tensors.erase("weight_zero_point");
  }
  const auto none = [](absl::string_view) { return false; };
  EXPECT_EQ(kQuarkFormat.lacks(linear.settings, none), "");
  linear.Set("symmetric", Setting::Literal(false));
  EXPECT_EQ(kQuarkFormat.lacks(linear.settings, none), "weight_zero_point");
  EXPECT_EQ(kQuarkFormat.lacks(MakeInt4("uint4").settings, none), "weight_zero_point");
}

Linear MakeInt8(std::vector<int64_t> scales) {
  Linear out = {.format = &kQuarkFormat};
  out.Set("dtype", Word("int8"));
  out.Add("weight", "I8", {2, 3});
  out.Add("weight_scale", "F32", std::move(scales));
  out.Put<int8_t>("weight", 5, -128);
  const auto count = static_cast<int64_t>(out.tensors["weight_scale"].bytes.size() / sizeof(float));
  for (int64_t i = 0; i < count; ++i) out.Put<float>("weight_scale", i, 0.5f);
  return out;
}

TEST(QuarkFormat, Int8HasOneScaleOrOneForEachColumn) {
  using Shape = std::vector<int64_t>;
  for (const auto& [shape, scheme] : std::vector<std::pair<Shape, std::string>>{
           {{}, "w8ts+fp32"}, {{1}, "w8ts+fp32"}, {{2}, "w8cs+fp32"}, {{2, 1}, "w8cs+fp32"}}) {
    const auto weight = MakeInt8(shape).Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    EXPECT_EQ(ToString(weight->scheme), scheme);
    EXPECT_EQ(WeightValue(*weight, 2, 1), -64.0f);
  }
}

class QuarkRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(QuarkRefusal, NamesThePart) { ExpectRefused(MakeInt8({2}), GetParam()); }

std::vector<Refusal> Refusals() {
  return {
      {"WeightMissing", Without("weight"), {"\"weight\": got nothing, expected I8 [N, K]"}},
      {"ScaleMissing", Without("weight_scale"), {"\"weight_scale\": got nothing"}},
      {"WeightDtype", WithDtype("weight", "U8"), {"\"weight\": got dtype U8"}},
      {"ScaleShape",
       WithShape("weight_scale", {3}),
       {"\"weight_scale\": got shape [3], expected [], [1], [2] or [2, 1] (N)"}},
      {"ScaleIsNan",
       [](Linear* l) { l->Put<uint32_t>("weight_scale", 1, 0x7fc00000); },
       {"\"weight_scale\": got NaN at element 1"}},
      {"ZeroPointShape",
       [](Linear* l) { l->Add("weight_zero_point", "I8", {3}); },
       {"\"weight_zero_point\": got shape [3], expected [2]"}},
      {"ZeroPointOfAll",
       [](Linear* l) { l->Add("weight_zero_point", "I8", {}); },
       {"\"weight_zero_point\": got shape [], expected [2]"}},
      {"ZeroPointDtype",
       [](Linear* l) { l->Add("weight_zero_point", "F32", {2}); },
       {"\"weight_zero_point\": got dtype F32, expected I8"}},
      {"SecondScale",
       [](Linear* l) { l->Add("weight_scale_2", "F32", {}); },
       {"\"weight_scale_2\": got it, expected none but with two quantisations"}},
      {"NoZeroPointsWithoutSign",
       [](Linear* l) {
         l->Set("dtype", Word("uint8"));
         l->Add("weight", "U8", {2, 3});
       },
       {"\"weight_zero_point\": got nothing"}},
      {"Fp4OfOtherCodes", With("dtype", Word("fp4")), {"\"weight\": got dtype I8, expected U8"}},
      {"Fp8OfOtherCodes", With("dtype", Word("fp8_e4m3")), {"\"weight\": got dtype I8"}},
      {"Uint4OfOtherCodes", With("dtype", Word("uint4")), {"\"weight\": got dtype I8"}},
      {"Fp6OfOtherCodes", With("dtype", Word("fp6_e3m2")), {"\"weight\": got dtype I8"}},
      {"Fp6OfPartsOfCodes",
       [](Linear* l) {
         l->Set("dtype", Word("fp6_e2m3"));
         l->Add("weight", "U8", {2, 4});
       },
       {"\"weight\": got shape [2, 4], expected rows of whole codes"}},
      {"E5m2", With("dtype", Word("fp8_e5m2")), {"dtype: got \"fp8_e5m2\", expected fp4"}},
      {"BiasShape", [](Linear* l) { l->Add("bias", "F16", {4}); }, {"\"bias\": got shape [4]"}},
  };
}

INSTANTIATE_TEST_SUITE_P(All, QuarkRefusal, ::testing::ValuesIn(Refusals()),
                         [](const auto& info) { return info.param.name; });

TEST(QuarkFormat, FactorAndTransformOfActivations) {
  Linear linear = MakeInt4("int4");
  linear.Add("input_prescale", "BF16", {4});
  linear.Add("input_rotation", "I8", {4, 4});
  for (int i = 0; i < 16; ++i) {
    if (i < 4) linear.Put<uint16_t>("input_prescale", i, 0x4000);  // 2
    linear.Put<int8_t>("input_rotation", i, std::popcount(unsigned(i / 4 & i)) % 2 == 0 ? 1 : -1);
  }
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->factor, std::vector<float>(4, 2.0f));
  EXPECT_EQ(weight->hadamard, (Hadamard{4, 0.5f}));
  linear.Put<int8_t>("input_rotation", 9, 3);
  EXPECT_THAT(std::string(linear.Decode().status().message()),
              HasSubstr("tensor \"input_rotation\": got 3 at [2, 1], expected a Hadamard matrix"));
  linear.Add("input_prescale", "BF16", {3});
  EXPECT_THAT(std::string(linear.Decode().status().message()), HasSubstr("input_prescale"));
}

// --- Settings ---

Setting Weights(Members weight) { return Object({{"weight", Object(std::move(weight))}}); }

Setting Fp4() {
  return Weights({{"dtype", Word("fp4")},
                  {"qscheme", Word("per_group")},
                  {"group_size", Setting::Literal(int64_t{32})},
                  {"scale_format", Word("e8m0")}});
}

Setting Config(Setting global, Members layers) {
  return Object({{"quant_method", Word("quark")},
                 {"export", Object({{"pack_method", Word("reorder")}})},
                 {"global_quant_config", std::move(global)},
                 {"layer_quant_config", Object(std::move(layers))}});
}

TEST(QuarkFormat, SingleNamesThenWildcardsThenAllOthers) {
  const Setting fp8 = Weights({{"dtype", Word("fp8_e4m3")}, {"qscheme", Word("per_tensor")}});
  const Setting int8 = Weights({{"dtype", Word("int8")}, {"qscheme", Word("per_channel")}});
  Setting config = Config(Fp4(), {{"*attn*", fp8}, {"a.b", int8}, {"a.c", fp8}, {"a.d", int8}});
  config.members["layer_quant_config"].members["a.e"] = Object({});  // has no "weight"
  config.members["exclude"].kind = Setting::Kind::kList;
  config.members["exclude"].list = {Word("lm_head"), Word("re:.*router"), Word("*.gate")};
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kQuarkFormat);
  const auto& rules = found->config.rules;
  ASSERT_EQ(rules.size(), 4);
  using Patterns = std::vector<ModulePattern>;
  EXPECT_EQ(rules[0].targets, (Patterns{{Kind::kPath, "a.b"}, {Kind::kPath, "a.d"}}));
  EXPECT_EQ(rules[1].targets, (Patterns{{Kind::kPath, "a.c"}}));
  EXPECT_EQ(rules[2].targets, (Patterns{{Kind::kRegex, ".*attn.*$"}}));
  EXPECT_EQ(rules[3].targets, Patterns{{}});
  EXPECT_EQ(rules[0].settings.members.at("dtype").text, "int8");
  EXPECT_EQ(rules[3].settings.members.at("dtype").text, "fp4");
  EXPECT_EQ(found->config.left_out, (Patterns{{Kind::kPath, "a.e"},
                                              {Kind::kPath, "lm_head"},
                                              {Kind::kRegex, ".*router"},
                                              {Kind::kRegex, ".*\\.gate$"}}));
}

TEST(QuarkFormat, OneUnreadTypeTakesItsLinearsWithIt) {
  const Setting e5m2 = Weights({{"dtype", Word("fp8_e5m2")}});
  const auto found = FindFormat(Config(Fp4(), {{"a.b", e5m2}}));
  ASSERT_TRUE(found.ok()) << found.status();
  const auto& rules = found->config.rules;
  ASSERT_EQ(rules.size(), 2);
  EXPECT_EQ(rules[0].unread.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(rules[0].unread.message()),
              HasSubstr("layer_quant_config.a.b.weight.dtype: got \"fp8_e5m2\""));
  EXPECT_TRUE(rules[1].unread.ok());
}

Setting List(std::vector<Setting> entries) {
  Setting out;
  out.kind = Setting::Kind::kList;
  out.list = std::move(entries);
  return out;
}

// The tensors show all that algorithms do to weights. Rotations of activations have a tensor.
TEST(QuarkFormat, LinearsWhoseActivationsAreRotatedNeedTheirMatrix) {
  const auto read = [](std::vector<Setting> algorithms) {
    Setting config = Config(Fp4(), {});
    config.members["algo_config"] = List(std::move(algorithms));
    return FindFormat(config);
  };
  const Setting smooth =
      Object({{"name", Word("smooth")}, {"alpha", Setting::Literal(int64_t{1})}});
  const Setting layers = Object(
      {{"middle_layers",
        List({Object({{"target_modules", List({Word("model.layers.layer_id.self_attn.q_proj")})},
                      {"next_modules", List({Word("model.layers.layer_id.mlp.gate")})}})})}});
  const auto rotation = [&](const char* what, bool layered) {
    Setting out = Object({{"name", Word("rotation")}, {"r1", Setting::Literal(true)}});
    out.members[what] = Setting::Literal(true);
    if (layered) out.members["scaling_layers"] = layers;
    return out;
  };
  for (const auto& fused : {std::vector{smooth},
                            {Object({{"name", Word("AWQ")}})},
                            {rotation("r2", true)},
                            {rotation("r3", true), smooth}}) {
    const auto found = read(fused);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->config.rules.size(), 1);
    EXPECT_TRUE(found->config.additions.empty());
  }
  const auto expect = [&](const Setting& algorithm, const std::string& target) {
    const auto found = read({smooth, algorithm});
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_EQ(found->config.additions.size(), 1);
    const LinearRule& rule = found->config.additions[0].rule;
    EXPECT_EQ(rule.targets, (std::vector<ModulePattern>{{Kind::kRegex, target}}));
    EXPECT_TRUE(rule.unread.ok());
    const auto has = [](bool matrix) {
      return [matrix](absl::string_view suffix) { return matrix || suffix != "input_rotation"; };
    };
    EXPECT_EQ(kQuarkFormat.lacks(rule.settings, has(false)), "input_rotation");
    EXPECT_EQ(kQuarkFormat.lacks(rule.settings, has(true)), "");
  };
  expect(rotation("r4", false), ".*down_proj$");
  expect(rotation("online_r1_rotation", true), "model\\.layers\\..*\\.self_attn\\.q_proj$");
  EXPECT_THAT(std::string(read({rotation("online_r1_rotation", false)}).status().message()),
              HasSubstr("algo_config.scaling_layers: got nothing, expected the linears of online"));
  EXPECT_THAT(std::string(read({Object({{"name", Word("svdquant")}})}).status().message()),
              HasSubstr("algo_config.name: got \"svdquant\""));
}

TEST(QuarkFormat, RefusesSettings) {
  const auto expect = [](Setting global, absl::StatusCode code, const std::string& says) {
    const absl::Status status = FindFormat(Config(std::move(global), {})).status();
    EXPECT_EQ(status.code(), code) << says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  };
  const auto with = [](const char* name, Setting value) {
    Setting out = Fp4();
    out.members["weight"].members[name] = std::move(value);
    return out;
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kOther = absl::StatusCode::kUnimplemented;
  expect(with("dtype", Word("mx9")), kOther, "global_quant_config.weight.dtype: got \"mx9");
  expect(with("scale_format", Word("e4m3")), kOther, "scale_format: got \"e4m3\"");
  expect(with("qscheme", Word("per_tensor")), kOther, "qscheme: got \"per_tensor\"");
  expect(with("dtype", Word("fp8_e4m3")), kOther,
         "qscheme: got \"per_group\", expected \"per_tensor\"");
  expect(Weights({{"dtype", Word("fp8_e4m3")}, {"qscheme", Word("per_block")}}), kInvalid,
         "block_n, block_k: got nothing");
  expect(with("ch_axis", Setting::Literal(int64_t{0})), kOther, "ch_axis: got 0, expected -1");
  expect(Weights({{"dtype", Word("int8")},
                  {"qscheme", Word("per_channel")},
                  {"ch_axis", Setting::Literal(int64_t{1})}}),
         kOther, "ch_axis: got 1, expected 0");
  Setting twice = Object({});
  twice.members["weight"].kind = Setting::Kind::kList;
  expect(twice, kOther, "weight: got a list");
  expect(Weights({}), kInvalid, "dtype: got nothing");
  expect(Object({}), kInvalid, "global_quant_config: got no quantisation of weights");
  Setting order = Config(Weights({{"dtype", Word("int4")}}), {});
  order.members["export"].members["pack_method"] = Word("shuffle");
  EXPECT_THAT(std::string(FindFormat(order).status().message()),
              HasSubstr("pack_method: got \"shuffle\", expected \"reorder\""));
}

Setting Twice(Members first, Members second) {
  return Object({{"weight", List({Object(std::move(first)), Object(std::move(second))})}});
}

TEST(QuarkFormat, TwoQuantisationsAreCodesAndTheirScalesOrTheirFirstStage) {
  const Members fp4 = Fp4().members.at("weight").members;
  const auto read = [](Setting global) { return FindFormat(Config(std::move(global), {})); };
  const auto scaled =
      read(Twice(fp4, {{"dtype", Word("fp8_e5m3")}, {"is_scale_quant", Setting::Literal(true)}}));
  ASSERT_TRUE(scaled.ok()) << scaled.status();
  const Members& codes = scaled->config.rules[0].settings.members;
  EXPECT_EQ(codes.at("scale_dtype").text, "fp8_e5m3");
  EXPECT_EQ(codes.at("dtype").text, "fp4");
  EXPECT_FALSE(codes.contains("scale_format"));
  const Members int4 = {{"dtype", Word("int4")}, {"qscheme", Word("per_channel")}};
  const auto staged = read(Twice({{"dtype", Word("fp8_e4m3")}}, int4));
  ASSERT_TRUE(staged.ok()) << staged.status();
  const Setting& settings = staged->config.rules[0].settings;
  EXPECT_EQ(settings.members.at("stage_dtype").text, "fp8_e4m3");
  EXPECT_EQ(settings.members.at("dtype").text, "int4");
  const auto none = [](absl::string_view) { return false; };
  EXPECT_EQ(kQuarkFormat.lacks(settings, none), "weight_scale_2");
  for (const auto& [first, second, says] : std::vector<std::tuple<Members, Members, std::string>>{
           {{{"dtype", Word("int4")}}, fp4, "weight: got a list with fp4"},
           {int4,
            {{"dtype", Word("fp8_e4m3")}, {"is_scale_quant", Setting::Literal(true)}},
            "weight: got a list with int4"},
           {{{"dtype", Word("fp8_e5m2")}}, int4, "stage_dtype: got \"fp8_e5m2\""},
           {fp4,
            {{"dtype", Word("int8")}, {"is_scale_quant", Setting::Literal(true)}},
            "scale_dtype: got \"int8\""}}) {
    EXPECT_THAT(std::string(read(Twice(first, second)).status().message()), HasSubstr(says));
  }
}

TEST(QuarkFormat, EveryCodeOfSixBits) {
  for (const auto& [dtype, mantissa_bits, bias] :
       {std::tuple("fp6_e2m3", 3, 1), std::tuple("fp6_e3m2", 2, 3)}) {
    Linear linear = {.format = &kQuarkFormat};
    linear.Set("dtype", Word(dtype));
    linear.Add("weight", "U8", {1, 48});
    linear.Add("weight_scale", "U8", {1, 2});
    for (int i = 0; i < 2; ++i) linear.Put<uint8_t>("weight_scale", i, 128);
    for (int code = 0; code < 64; code += 4) {
      const uint32_t four = code | (code + 1) << 6 | (code + 2) << 12 | (code + 3) << 18;
      for (int i = 0; i < 3; ++i) linear.Put<uint8_t>("weight", code / 4 * 3 + i, four >> 8 * i);
    }
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    for (int code = 0; code < 64; ++code) {
      const int exponent = (code & 31) >> mantissa_bits, whole = 1 << mantissa_bits;
      const float mantissa = static_cast<float>(code % whole) / static_cast<float>(whole);
      const float magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias)
                                            : std::ldexp(1 + mantissa, exponent - bias);
      EXPECT_EQ(WeightValue(*weight, code, 0), 2 * (code < 32 ? magnitude : -magnitude))
          << dtype << " " << code;
    }
  }
}

TEST(QuarkFormat, Fp8OfBlocks) {
  Setting weights = Weights({{"dtype", Word("fp8_e4m3")}, {"qscheme", Word("per_block")}});
  weights.members["weight"].members["block_size"] =
      List({Setting::Literal(int64_t{2}), Setting::Literal(int64_t{4})});
  const auto found = FindFormat(Config(weights, {}));
  ASSERT_TRUE(found.ok()) << found.status();
  Linear linear = {.format = &kQuarkFormat, .settings = found->config.rules[0].settings};
  linear.Add("weight", "F8_E4M3", {4, 8});
  linear.Add("weight_scale", "BF16", {2, 2});
  linear.Put<uint8_t>("weight", 3 * 8 + 4, 0x38);   // 1
  linear.Put<uint16_t>("weight_scale", 3, 0x4040);  // 3
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "e4m3b4x2+bf16");
  EXPECT_EQ(WeightValue(*weight, 4, 3), 3.0f);
}

}  // namespace
}  // namespace awqd
