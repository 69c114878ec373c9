// "quanto" and "quanto-packed": their settings, their tensors, and every refusal.
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using Kind = ModulePattern::Kind;

Setting Word(const std::string& text) { return Setting::String(text); }

// N = 2, K = 3; scales 1 and 2.
Linear MakeBytes(const std::string& weights, const std::string& dtype) {
  Linear out = {.format = &kQuantoFormat};
  out.Set("weights", Word(weights));
  out.Add("weight._data", dtype, {2, 3});
  out.Add("weight._scale", "F32", {2, 1});
  for (int i = 0; i < 2; ++i) out.Put<float>("weight._scale", i, static_cast<float>(i + 1));
  out.Put<uint8_t>("weight._data", 5, 0xb8);  // -72, or -1
  return out;
}

TEST(QuantoFormat, EightBits) {
  for (const auto& [weights, dtype, scheme, value] :
       {std::tuple("qint8", "I8", "w8cs+fp32", -144.0f),
        std::tuple("int8", "I8", "w8cs+fp32", -144.0f),
        std::tuple("qfloat8_e4m3fn", "F8_E4M3", "e4m3c+fp32", -2.0f),
        std::tuple("qfloat8", "U8", "e4m3c+fp32", -2.0f)}) {
    const auto weight = MakeBytes(weights, dtype).Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    EXPECT_EQ(ToString(weight->scheme), scheme);
    EXPECT_EQ(WeightValue(*weight, 2, 1), value);
  }
}

// N = 2, K = 64 in groups of 32: four rows of codes in two rows of bytes. Scales 1 .. 4, shifts 0.
Linear MakePacked() {
  Linear out = {.format = &kQuantoPackedFormat};
  out.Set("weights", Word("qint4"));
  out.Set("in_features", 64);
  out.Add("weight._data._data", "U8", {2, 32});
  out.Add("weight._scale", "F32", {4, 1});
  out.Add("weight._shift", "F32", {4, 1});
  for (int i = 0; i < 4; ++i) out.Put<float>("weight._scale", i, static_cast<float>(i + 1));
  out.Put<uint8_t>("weight._data._data", 32 + 5, 0x73);  // row 1 has 3, and row 3 has 7
  return out;
}

TEST(QuantoPackedFormat, RowsOfCodesLieInHalvesOfBytes) {
  Linear linear = MakePacked();
  linear.Put<float>("weight._shift", 3, 0.5f);
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w4g32o:fp32+fp32");
  EXPECT_EQ(WeightValue(*weight, 32 + 5, 0), 6.0f);   // row 1: 3 * 2
  EXPECT_EQ(WeightValue(*weight, 32 + 5, 1), 27.5f);  // row 3: 7 * 4 - 0.5
  EXPECT_EQ(WeightValue(*weight, 33, 1), -0.5f);
  linear.Add("weight._shift", "U8", {4, 1});
  linear.Put<uint8_t>("weight._shift", 3, 15);
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w4g32z+fp32");
  EXPECT_EQ(WeightValue(*weight, 32 + 5, 1), -32.0f);  // (7 - 15) * 4
}

TEST(QuantoPackedFormat, TwoBits) {
  Linear linear = MakePacked();
  linear.Set("weights", Word("int2"));
  linear.Add("weight._data._data", "U8", {1, 32});
  linear.Put<uint8_t>("weight._data._data", 7, 0b11'10'01'00);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w2g32o:fp32+fp32");
  EXPECT_EQ(WeightValue(*weight, 7, 0), 0.0f);
  EXPECT_EQ(WeightValue(*weight, 39, 0), 2.0f);
  EXPECT_EQ(WeightValue(*weight, 7, 1), 6.0f);
  EXPECT_EQ(WeightValue(*weight, 39, 1), 12.0f);
}

// K comes from a setting, the checkpoint, a bias, or a group of another size than quanto's.
TEST(QuantoPackedFormat, WhatTellsInFeatures) {
  Linear linear = MakePacked();
  linear.settings.members.erase("in_features");
  LinearTensors views = linear.Views();
  const auto decode = [&] { return linear.format->Decode(linear.settings, views); };
  EXPECT_THAT(std::string(decode().status().message()),
              HasSubstr("\"weight._data._data\": got 128 codes in groups of 32, expected a bias "
                        "[N], in_features, or a config.json whose hidden_size tells K"));
  TensorView& codes = views.at("weight._data._data");
  codes.in_features = 64;
  ASSERT_TRUE(decode().ok()) << decode().status();
  EXPECT_EQ(decode()->k, 64);
  codes.in_features = 48;
  EXPECT_THAT(std::string(decode().status().message()),
              HasSubstr("expected whole rows of K = 48 in groups"));
  codes.in_features = 0;
  codes.out_features = 2;
  ASSERT_TRUE(decode().ok()) << decode().status();
  EXPECT_EQ(decode()->k, 64);
  codes.out_features = 3;
  EXPECT_THAT(std::string(decode().status().message()), HasSubstr("expected a multiple of N = 3"));
  codes.out_features = 4;
  codes.in_features = 64;
  EXPECT_THAT(std::string(decode().status().message()),
              HasSubstr("expected whole rows of K = 64 in groups, N = 4"));
  codes.in_features = codes.out_features = 0;
  const std::vector<uint8_t> bias(4 * sizeof(float));
  views["bias"] = {"F32", {4}, bias};
  ASSERT_TRUE(decode().ok()) << decode().status();
  EXPECT_EQ(decode()->k, 32);
  views.erase("bias");
  codes.shape = {4, 16};
  ASSERT_FALSE(decode().ok());
  linear.Reshape("weight._data._data", {2, 31});
  views = linear.Views();
  ASSERT_TRUE(decode().ok()) << decode().status();
  EXPECT_EQ(decode()->k, 31);
  EXPECT_EQ(decode()->n, 4);
}

class QuantoRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(QuantoRefusal, NamesThePart) { ExpectRefused(MakeBytes("qint8", "I8"), GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    All, QuantoRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"CodesMissing", Without("weight._data"), {"\"weight._data\": got nothing"}},
        {"ScaleMissing", Without("weight._scale"), {"\"weight._scale\": got nothing"}},
        {"CodeDtype", WithDtype("weight._data", "F8_E5M2"), {"got dtype F8_E5M2, expected I8"}},
        {"CodeRank", WithShape("weight._data", {2, 3, 1, 1}), {"got shape [2, 3, 1, 1]"}},
        {"ScaleShape",
         WithShape("weight._scale", {3, 1}),
         {"\"weight._scale\": got shape [3, 1], expected [], [1], [2] or [2, 1] (N)"}},
        {"NoWeights",
         [](Linear* l) { l->settings = {}; },
         {"weights: got nothing, expected qint8, qint4, qint2 or qfloat8_e4m3fn"}},
        {"OtherWeights",
         With("weights", Word("qfloat8_e5m2")),
         {"weights: got \"qfloat8_e5m2\", expected qint8"}},
        {"PackedWeights",
         With("weights", Word("qint4")),
         {"weights: got \"qint4\", expected 8 bits for \"weight._data\""}},
        {"BiasShape", [](Linear* l) { l->Add("bias", "F32", {3}); }, {"\"bias\": got shape [3]"}}}),
    [](const auto& info) { return info.param.name; });

class QuantoPackedRefusal : public ::testing::TestWithParam<Refusal> {};
TEST_P(QuantoPackedRefusal, NamesThePart) { ExpectRefused(MakePacked(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    All, QuantoPackedRefusal,
    ::testing::ValuesIn(std::vector<Refusal>{
        {"CodesMissing", Without("weight._data._data"), {"\"weight._data._data\": got nothing"}},
        {"ScaleMissing", Without("weight._scale"), {"\"weight._scale\": got nothing"}},
        {"ShiftMissing", Without("weight._shift"), {"\"weight._shift\": got nothing"}},
        {"CodeDtype", WithDtype("weight._data._data", "I8"), {"got dtype I8, expected U8"}},
        {"CodesShort", Short("weight._data._data"), {"got 63 bytes, expected 64"}},
        {"Rows",
         WithShape("weight._data._data", {3, 32}),
         {"\"weight._data._data\": got shape [3, 32], expected 2 rows, as \"weight._scale\" has "
          "4"}},
        {"ScaleShape",
         WithShape("weight._scale", {2, 2}),
         {"\"weight._scale\": got shape [2, 2], expected [2, 1]"}},
        {"ShiftShape",
         WithShape("weight._shift", {3, 1}),
         {"\"weight._shift\": got shape [3, 1], expected [4, 1]"}},
        {"ShiftDtype", WithDtype("weight._shift", "I32"), {"\"weight._shift\": got dtype I32"}},
        {"ShiftOutside",
         [](Linear* l) {
           l->Add("weight._shift", "U8", {4, 1});
           l->Put<uint8_t>("weight._shift", 1, 16);
         },
         {"\"weight._shift\": got 16, expected 0 to 15"}},
        {"ShiftIsNan",
         [](Linear* l) { l->Put<uint32_t>("weight._shift", 1, 0x7fc00000); },
         {"\"weight._shift\": got NaN at element 1"}},
        {"EightBits",
         With("weights", Word("qint8")),
         {"weights: got \"qint8\", expected qint4 or qint2 for \"weight._data._data\""}},
        {"InFeatures", With("in_features", 48), {"expected whole rows of K = 48 in groups"}},
        {"InFeaturesOfZero", With("in_features", 0), {"in_features: got 0"}},
        {"BiasOfOthers",
         [](Linear* l) { l->Add("bias", "F32", {3}); },
         {"expected whole rows of K = 64 in groups, N = 3"}}}),
    [](const auto& info) { return info.param.name; });

// --- Settings ---

Setting Entry(const std::string& weights, const std::string& activations = "none") {
  Setting out;
  out.members = {{"weights", Word(weights)}, {"activations", Word(activations)}};
  return out;
}

TEST(QuantoFormat, TheMapHasATypeForEachPath) {
  Setting map;
  map.members = {{"quant_method", Word("quanto")}, {"a.q", Entry("qint8")},
                 {"a.k", Entry("qint4")},          {"a.v", Entry("qint8", "qint8")},
                 {"a.norm", Entry("none")},        {"b.q", Entry("qfloat8_e5m2")}};
  const auto found = FindFormat(map);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kQuantoFormat);
  EXPECT_THAT(found->config.note, HasSubstr("activations has no effect"));
  const auto& rules = found->config.rules;
  ASSERT_EQ(rules.size(), 3);
  int unread = 0;
  for (const LinearRule& rule : rules) {
    if (!rule.unread.ok()) {
      ++unread;
      EXPECT_EQ(rule.unread.code(), absl::StatusCode::kUnimplemented);
      EXPECT_THAT(std::string(rule.unread.message()),
                  HasSubstr("b.q.weights: got \"qfloat8_e5m2\", expected qint8"));
      continue;
    }
    const bool packed = rule.settings.members.at("weights").text == "qint4";
    EXPECT_EQ(rule.format, packed ? &kQuantoPackedFormat : &kQuantoFormat);
    using Patterns = std::vector<ModulePattern>;
    const Patterns one = {{Kind::kPath, "a.k"}};
    const Patterns two = {{Kind::kPath, "a.q"}, {Kind::kPath, "a.v"}};
    EXPECT_EQ(rule.targets, packed ? one : two);
  }
  EXPECT_EQ(unread, 1);
}

TEST(QuantoFormat, OneTypeForAllLinears) {
  for (const char* name : {"weights", "weights_dtype"}) {
    Setting config;
    config.members["quant_method"] = Word("quanto");
    config.members[name] = Word("int4");
    const auto found = FindFormat(config);
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_EQ(found->config.rules.size(), 1);
    EXPECT_EQ(found->config.rules[0].format, &kQuantoPackedFormat);
    EXPECT_EQ(found->config.rules[0].settings.members.at("weights").text, "qint4");
    config.members[name] = Word("int3");
    const absl::Status status = FindFormat(config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"int3\", expected qint8, qint4"));
  }
  Setting nothing;
  nothing.members["quant_method"] = Word("quanto");
  EXPECT_THAT(std::string(FindFormat(nothing).status().message()),
              HasSubstr("weights: got nothing, expected qint8"));
}

}  // namespace
}  // namespace awqd
