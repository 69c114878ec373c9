// compressed-tensors "int-quantized": its settings, its tensors, and every refusal.
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

// N = 3, K = 4: code [n, k] is 10 n + k - 5; a scale of n + 1 per channel.
Linear MakeLinear() {
  Linear out = {.format = &kIntQuantizedFormat};
  out.Add("weight", "I8", {3, 4});
  out.Add("weight_scale", "F32", {3, 1});
  for (int i = 0; i < 12; ++i) out.Put<int8_t>("weight", i, 10 * (i / 4) + i % 4 - 5);
  for (int i = 0; i < 3; ++i) out.Put<float>("weight_scale", i, static_cast<float>(i + 1));
  return out;
}

TEST(IntQuantizedFormat, Channel) {
  const auto weight = MakeLinear().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(weight->k, 4);
  EXPECT_EQ(weight->n, 3);
  EXPECT_EQ(ToString(weight->scheme), "w8cs+fp32");
  for (int k = 0; k < 4; ++k) {
    for (int n = 0; n < 3; ++n) {
      EXPECT_EQ(WeightValue(*weight, k, n), static_cast<float>((10 * n + k - 5) * (n + 1)));
    }
  }
}

TEST(IntQuantizedFormat, GroupsAndTensor) {
  Linear linear = MakeLinear();
  linear.Set("strategy", Setting::Typed("group"));
  linear.Set("group_size", 3);  // the last group is short
  linear.Add("weight_scale", "BF16", {3, 2});
  linear.Put<uint16_t>("weight_scale", 3, 0x4040);  // n = 1, group 1: 3
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w8g3s+bf16");
  EXPECT_EQ(weight->Scale(1, 1), 3.0f);
  linear = MakeLinear();
  linear.Set("strategy", Setting::Typed("tensor"));
  linear.Add("weight_scale", "F16", {1});
  linear.Put<uint16_t>("weight_scale", 0, 0x3c00);
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w8ts");
  EXPECT_EQ(WeightValue(*weight, 2, 1), 7.0f);
}

TEST(IntQuantizedFormat, EveryCodeOfEachWidth) {
  for (const int bits : {8, 4}) {
    const int count = 1 << bits;
    Linear linear = {.format = &kIntQuantizedFormat};
    linear.Set("num_bits", bits);
    linear.Add("weight", "I8", {count, 1});
    linear.Add("weight_scale", "F16", {count, 1});
    for (int i = 0; i < count; ++i) linear.Put<int8_t>("weight", i, i - count / 2);
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    for (int i = 0; i < count; ++i) EXPECT_EQ(weight->Code(0, i), i);
  }
}

TEST(IntQuantizedFormat, ZeroPointsOfNothing) {
  Linear linear = MakeLinear();
  linear.Add("weight_zero_point", "I8", {3, 1});
  EXPECT_TRUE(linear.Decode().ok()) << linear.Decode().status();
}

TEST(IntQuantizedFormat, DeclaredActivations) {
  Linear linear = MakeLinear();
  EXPECT_EQ(linear.Decode()->activations.how, ActivationQuantization::kNone);
  linear.Set("activations", Setting::Typed("dynamic"));
  EXPECT_EQ(linear.Decode()->activations.how, ActivationQuantization::kPerToken);
  linear.Set("activations", Setting::Typed("static"));
  linear.Add("input_scale", "BF16", {1});
  linear.Put<uint16_t>("input_scale", 0, 0x3e80);
  linear.Add("input_zero_point", "I8", {1});
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->activations.how, ActivationQuantization::kStatic);
  EXPECT_EQ(weight->activations.scale, 0.25f);
}

class IntQuantizedRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(IntQuantizedRefusal, NamesThePart) { ExpectRefused(MakeLinear(), GetParam()); }

std::vector<Refusal> Refusals() {
  return {
      {"WeightMissing", Without("weight"), {"\"weight\": got nothing, expected I8 [N, K]"}},
      {"ScaleMissing", Without("weight_scale"), {"\"weight_scale\": got nothing"}},
      {"WeightDtype", WithDtype("weight", "U8"), {"\"weight\": got dtype U8, expected I8"}},
      {"WeightRank", WithShape("weight", {3, 4, 1}), {"\"weight\": got shape [3, 4, 1]"}},
      {"WeightShort", Short("weight"), {"\"weight\": got 11 bytes, expected 12"}},
      {"ScaleDtype", WithDtype("weight_scale", "I32"), {"\"weight_scale\": got dtype I32"}},
      {"ScaleRank", WithShape("weight_scale", {3}), {"\"weight_scale\": got shape [3]"}},
      {"ScaleRows", WithShape("weight_scale", {4, 1}), {"got shape [4, 1], expected [3, 1]"}},
      {"ScaleGroups", WithShape("weight_scale", {3, 2}), {"got 2 groups, expected 1"}},
      {"ScaleShort", Short("weight_scale"), {"\"weight_scale\": got 11 bytes, expected 12"}},
      {"ScaleIsNan",
       [](Linear* l) { l->Put<uint32_t>("weight_scale", 1, 0x7fc00000); },
       {"\"weight_scale\": got NaN at element 1"}},
      {"BlockLargerThanTheMatrix",
       [](Linear* l) {
         l->Set("strategy", Setting::Typed("group"));
         l->Set("group_size", 5);
       },
       {"group_size: got 5, expected -1 or 1 to K = 4"}},
      {"GroupWithoutSize", With("strategy", Setting::Typed("group")), {"group_size: got nothing"}},
      {"TensorOfRows", With("strategy", Setting::Typed("tensor")), {"expected rank 1"}},
      {"UnknownStrategy", With("strategy", Setting::Typed("block")), {"strategy: got \"block\""}},
      {"CodeOutOfRange", With("num_bits", 4), {"\"weight\": got 15 at [2, 0], expected -8 to 7"}},
      {"ThreeBits", With("num_bits", 3), {"num_bits: got 3, expected 8 or 4"}},
      {"Asymmetric", With("symmetric", Setting::Literal(false)), {"symmetric: got false"}},
      {"ZeroPoint",
       [](Linear* l) {
         l->Add("weight_zero_point", "I8", {3, 1});
         l->Put<int8_t>("weight_zero_point", 2, 1);
       },
       {"\"weight_zero_point\": got other values than 0"}},
      {"ActivationsHow",
       With("activations", Setting::Typed("some")),
       {"activations: got \"some\""}},
      {"InputScaleMissing",
       With("activations", Setting::Typed("static")),
       {"\"input_scale\": got nothing, expected F16, BF16 or F32 [1]"}},
      {"InputScaleOfZero",
       [](Linear* l) {
         l->Set("activations", Setting::Typed("static"));
         l->Add("input_scale", "F32", {1});
       },
       {"\"input_scale\": got 0, expected a positive number"}},
      {"InputZeroPoint",
       [](Linear* l) {
         l->Set("activations", Setting::Typed("static"));
         l->Add("input_scale", "F32", {1});
         l->Put<float>("input_scale", 0, 1);
         l->Add("input_zero_point", "I8", {1});
         l->Put<int8_t>("input_zero_point", 0, 3);
       },
       {"\"input_zero_point\": got another value than 0"}},
      {"ZeroPointDtype",
       [](Linear* l) {
         l->Add("weight_zero_point", "F16", {3, 1});
       },
       {"\"weight_zero_point\": got dtype F16, expected I8"}},
      {"ZeroPointShape",
       [](Linear* l) {
         l->Add("weight_zero_point", "I8", {1, 1});
       },
       {"\"weight_zero_point\": got shape [1, 1], expected [3, 1]"}},
      {"BiasShape", [](Linear* l) { l->Add("bias", "F16", {4}); }, {"\"bias\": got shape [4]"}},
  };
}

INSTANTIATE_TEST_SUITE_P(All, IntQuantizedRefusal, ::testing::ValuesIn(Refusals()),
                         [](const auto& info) { return info.param.name; });

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

Setting Weights() {
  return Object({{"num_bits", Setting::Literal(int64_t{8})},
                 {"type", Setting::String("int")},
                 {"symmetric", Setting::Literal(true)},
                 {"strategy", Setting::String("channel")},
                 {"group_size", {Setting::Kind::kNull}},
                 {"dynamic", Setting::Literal(false)},
                 {"actorder", {Setting::Kind::kNull}}});
}

Setting Config(Setting weights = Weights()) {
  return Object(
      {{"quant_method", Setting::String("compressed-tensors")},
       {"format", Setting::String("int-quantized")},
       {"ignore", List({Setting::String("lm_head"), Setting::String("re:.*gate$")})},
       {"config_groups", Object({{"group_0", Object({{"targets", List({Setting::String("Linear")})},
                                                     {"weights", std::move(weights)}})}})}});
}

Setting& Group(Setting& config) { return config.members["config_groups"].members["group_0"]; }

TEST(IntQuantizedFormat, ReadsGroupsAndWhatIsLeftOut) {
  Setting config = Config();
  config.members["config_groups"].members["group_1"] =
      Object({{"targets", List({Setting::String("re:a.*"), Setting::String("b.c")})},
              {"weights", Weights()},
              {"format", Setting::String("int-quantized")}});
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kIntQuantizedFormat);
  EXPECT_EQ(found->quant_method, "compressed-tensors");
  // The most specific targets come first.
  ASSERT_EQ(found->config.rules.size(), 3u);
  EXPECT_THAT(found->config.rules[0].targets, ElementsAre(ModulePattern{Kind::kPath, "b.c"}));
  EXPECT_THAT(found->config.rules[1].targets, ElementsAre(ModulePattern{Kind::kRegex, "a.*"}));
  EXPECT_THAT(found->config.rules[2].targets, ElementsAre(ModulePattern{Kind::kEvery, ""}));
  EXPECT_EQ(found->config.rules[2].format, &kIntQuantizedFormat);
  EXPECT_THAT(found->config.left_out, ElementsAre(ModulePattern{Kind::kPath, "lm_head"},
                                                  ModulePattern{Kind::kRegex, ".*gate$"}));
  EXPECT_EQ(found->config.note, "");
  EXPECT_EQ(found->config.rules[0].settings.members.count("type"), 0u);
}

// The activations' quantisation in config.json, as the setting of a linear; empty if it has no
// effect.
TEST(IntQuantizedFormat, QuantisedActivationsAreDeclared) {
  const auto declared = [](std::map<std::string, Setting, std::less<>> members) {
    Setting config = Config();
    Group(config).members["input_activations"] = Object(std::move(members));
    const auto found = FindFormat(config);
    EXPECT_TRUE(found.ok()) << found.status();
    const Setting* const setting = FindSetting(found->config.rules.front().settings, "activations");
    EXPECT_EQ(setting == nullptr, !found->config.note.empty()) << found->config.note;
    return setting == nullptr ? "" : setting->text;
  };
  const Setting yes = Setting::Literal(true), no = Setting::Literal(false);
  EXPECT_EQ(declared({{"num_bits", Setting::Literal(int64_t{8})},
                      {"type", Setting::String("int")},
                      {"symmetric", yes},
                      {"strategy", Setting::String("token")},
                      {"dynamic", yes}}),
            "dynamic");
  EXPECT_EQ(declared({{"strategy", Setting::String("tensor")}, {"dynamic", no}}), "static");
  EXPECT_EQ(declared({{"num_bits", Setting::Literal(int64_t{4})}, {"dynamic", yes}}), "");
  EXPECT_EQ(declared({{"type", Setting::String("float")}, {"dynamic", yes}}), "fp8_dynamic");
  EXPECT_EQ(declared({{"symmetric", no}, {"dynamic", yes}}), "");
  EXPECT_EQ(declared({{"strategy", Setting::String("group")}, {"dynamic", yes}}), "");
  EXPECT_EQ(declared({{"dynamic", Setting::String("local")}}), "");
}

TEST(IntQuantizedFormat, RefusesSettings) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kOther = absl::StatusCode::kUnimplemented;
  const std::string group = "config_groups.group_0.";
  const auto expect = [](const Setting& config, absl::StatusCode code, const std::string& says) {
    const absl::Status status = FindFormat(config).status();
    EXPECT_EQ(status.code(), code) << says;
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
  };
  Setting config = Config();
  config.members["format"] = Setting::String("float-quantized");
  expect(config, kOther, group + "type: got \"int\", expected \"float\"");
  Group(config).members["format"] = Setting::String("int-quantized");
  EXPECT_TRUE(FindFormat(config).ok()) << "a group's own format counts";
  config = Config();
  config.members["config_groups"] = Object({});
  expect(config, kInvalid, "config_groups: got nothing");
  config.members["config_groups"] = Object({{"x", Setting::Literal(int64_t{1})}});
  expect(config, kInvalid, "config_groups.x.group: got 1, expected an object");
  config = Config();
  Group(config).members["targets"] = Setting::String("Linear");
  expect(config, kInvalid, group + "targets: got \"Linear\", expected null or a list");
  config = Config({Setting::Kind::kNull});
  expect(config, kOther, group + "weights: got nothing");
  const auto with = [&](const char* name, Setting value) {
    Setting weights = Weights();
    weights.members[name] = std::move(value);
    return Config(std::move(weights));
  };
  expect(with("type", Setting::String("float")), kOther, group + "type: got \"float\"");
  expect(with("dynamic", Setting::Literal(true)), kOther, group + "dynamic: got true");
  expect(with("actorder", Setting::String("group")), kOther, group + "actorder: got \"group\"");
  expect(with("symmetric", Setting::Literal(false)), kOther, group + "symmetric: got false");
  expect(with("num_bits", Setting::Literal(int64_t{3})), kOther, group + "num_bits: got 3");
  expect(with("num_bits", Setting::String("8")), kInvalid, group + "num_bits: got \"8\"");
}

}  // namespace
}  // namespace awqd
