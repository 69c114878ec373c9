// "quark": its settings, its tensors, and every refusal.
#include <bit>
#include <string>
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
      {"ZeroPoint",
       [](Linear* l) {
         l->Add("weight_zero_point", "I8", {2});
         l->Put<int8_t>("weight_zero_point", 1, 3);
       },
       {"\"weight_zero_point\": got other values than 0"}},
      {"Fp4OfOtherCodes", With("dtype", Word("fp4")), {"\"weight\": got dtype I8, expected U8"}},
      {"Fp8OfOtherCodes", With("dtype", Word("fp8_e4m3")), {"\"weight\": got dtype I8"}},
      {"Uint4OfOtherCodes", With("dtype", Word("uint4")), {"\"weight\": got dtype I8"}},
      {"Fp6", With("dtype", Word("fp6_e3m2")), {"dtype: got \"fp6_e3m2\", expected fp4"}},
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
  const Setting fp6 = Weights({{"dtype", Word("fp6_e3m2")}});
  const auto found = FindFormat(Config(Fp4(), {{"a.b", fp6}}));
  ASSERT_TRUE(found.ok()) << found.status();
  const auto& rules = found->config.rules;
  ASSERT_EQ(rules.size(), 2);
  EXPECT_EQ(rules[0].unread.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(rules[0].unread.message()),
              HasSubstr("layer_quant_config.a.b.weight.dtype: got \"fp6_e3m2\""));
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
  expect(with("dtype", Word("fp6_e3m2")), kOther, "global_quant_config.weight.dtype: got \"fp6");
  expect(with("scale_format", Word("float32")), kOther, "scale_format: got \"float32\"");
  expect(with("group_size", Setting::Literal(int64_t{16})), kOther, "group_size: got 16");
  expect(with("qscheme", Word("per_tensor")), kOther, "qscheme: got \"per_tensor\"");
  expect(with("dtype", Word("int8")), kOther,
         "qscheme: got \"per_group\", expected \"per_tensor\"");
  expect(Weights({{"dtype", Word("int8")}, {"symmetric", Setting::Literal(false)}}), kOther,
         "symmetric: got false");
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
  order.members["export"].members["pack_method"] = Word("order");
  EXPECT_THAT(std::string(FindFormat(order).status().message()),
              HasSubstr("pack_method: got \"order\", expected \"reorder\""));
}

}  // namespace
}  // namespace awqd
