// "plain": the meaning of its settings, and every refusal.
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

// K = 6 in groups of 4 and 2, N = 3, 4 bits; codes 0, 1, 2, ... modulo 16, scales 0.5.
Linear MakeLinear() {
  Linear out = {.format = &kPlainFormat};
  out.Set("bits", 4);
  out.Set("group_size", 4);
  out.Set("zero", 5);
  out.Add("codes", "U8", {6, 3});
  out.Add("scales", "F16", {2, 3});
  for (int i = 0; i < 18; ++i) out.Put<uint8_t>("codes", i, i % 16);
  for (int i = 0; i < 6; ++i) out.Put<uint16_t>("scales", i, 0x3800);
  return out;
}

TEST(PlainFormat, ConstantZeroAndAShortGroup) {
  Linear linear = MakeLinear();
  linear.Put<uint16_t>("scales", 5, 0x4000);  // for the second group, column 2
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w4g4m5");
  EXPECT_EQ(WeightValue(*weight, 0, 0), -2.5f);
  EXPECT_EQ(WeightValue(*weight, 3, 2), 3.0f);   // (11 - 5) / 2
  EXPECT_EQ(WeightValue(*weight, 5, 2), -8.0f);  // (17 % 16 - 5) * 2
}

TEST(PlainFormat, Zeros) {
  Linear linear = MakeLinear();
  linear.settings.members.erase("zero");
  linear.Add("zeros", "U8", {2, 3});
  linear.Put<uint8_t>("zeros", 4, 15);
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4g4z");
  EXPECT_EQ(weight->Zero(1, 1), 15);
  linear.tensors.erase("zeros");
  linear.Set("symmetric", Setting::Literal(true));
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4g4s");
}

// QServe's two levels: INT8 for a group, FP16 for a column.
TEST(PlainFormat, Int8ScalesAndOuter) {
  Linear linear = MakeLinear();
  linear.Add("scales", "I8", {2, 3});
  linear.Put<int8_t>("scales", 4, -3);
  linear.Add("outer", "F16", {3});
  linear.Put<uint16_t>("outer", 1, 0x3400);  // 0.25
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w4g4m5+int8*c");
  EXPECT_EQ(WeightValue(*weight, 4, 1), (13 - 5) * -3 * 0.25f);
  linear.Add("outer", "F32", {1});
  linear.Put<float>("outer", 0, 2);
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4g4m5+int8*t");
  EXPECT_EQ(WeightValue(*weight, 4, 1), (13 - 5) * -3 * 2.0f);
  linear.Add("outer", "F32", {2});
  EXPECT_TRUE(absl::IsInvalidArgument(linear.Decode().status()));
}

TEST(PlainFormat, EveryWidth) {
  for (int bits = 1; bits <= 8; ++bits) {
    Linear linear = MakeLinear();
    linear.Set("bits", bits);
    for (int i = 0; i < 18; ++i) linear.Put<uint8_t>("codes", i, (i * 37) & ((1 << bits) - 1));
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    for (int i = 0; i < 18; ++i) {
      EXPECT_EQ(weight->Code(i / 3, i % 3), (i * 37) & ((1 << bits) - 1)) << bits << " bits, " << i;
    }
  }
}

TEST(PlainFormat, UnsaidBitsAreEightAndUnsaidGroupsEqual) {
  Linear linear = MakeLinear();
  linear.settings.members.erase("bits");
  linear.settings.members.erase("group_size");
  linear.Put<uint8_t>("codes", 0, 255);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w8g3m5");
}

TEST(PlainFormat, ReadsACheckpointsSettings) {
  Setting config = MakeLinear().settings;
  config.members["quant_method"] = Setting::String("plain");
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kPlainFormat);
  EXPECT_EQ(found->config.rules.at(0).settings, MakeLinear().settings);
  config.members["bits"] = Setting::Literal(int64_t{9});
  EXPECT_TRUE(absl::IsInvalidArgument(FindFormat(config).status()));
}

class PlainRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(PlainRefusal, NamesThePart) { ExpectRefused(MakeLinear(), GetParam()); }

std::vector<Refusal> Refusals() {
  const auto zeros = [](const std::string& dtype, std::vector<int64_t> shape) {
    return [=](Linear* l) {
      l->settings.members.erase("zero");
      l->Add("zeros", dtype, shape);
    };
  };
  return {
      {"CodesMissing", Without("codes"), {"\"codes\": got nothing, expected U8 [K, N]"}},
      {"ScalesMissing", Without("scales"), {"\"scales\": got nothing"}},
      {"CodesDtype", WithDtype("codes", "I8"), {"\"codes\": got dtype I8, expected U8"}},
      {"CodesRank", WithShape("codes", {18}), {"\"codes\": got shape [18], expected rank 2"}},
      {"CodesShort", Short("codes"), {"\"codes\": got 17 bytes, expected 18 for U8 [6, 3]"}},
      {"ScalesDtype", WithDtype("scales", "U8"), {"\"scales\": got dtype U8"}},
      {"ScalesShort", Short("scales"), {"\"scales\": got 11 bytes, expected 12"}},
      {"ScalesColumns", WithShape("scales", {2, 4}), {"\"scales\": got shape [2, 4], expected"}},
      {"ScalesGroups", WithShape("scales", {3, 3}), {"\"scales\": got 3 groups, expected 2"}},
      {"ScaleIsNan",
       [](Linear* l) { l->Put<uint16_t>("scales", 4, 0xfe01); },
       {"\"scales\": got NaN at element 4"}},
      {"CodeOutOfRange",
       [](Linear* l) { l->Put<uint8_t>("codes", 7, 16); },
       {"\"codes\": got 16 at [2, 1], expected 0 to 15 for 4 bits"}},
      {"ZeroOutOfRange",
       [](Linear* l) {
         l->settings.members.erase("zero");
         l->Add("zeros", "U8", {2, 3});
         l->Put<uint8_t>("zeros", 5, 200);
       },
       {"\"zeros\": got 200 at [1, 2], expected 0 to 15"}},
      {"ZerosDtype", zeros("F16", {2, 3}), {"\"zeros\": got dtype F16, expected U8"}},
      {"ZerosShape", zeros("U8", {1, 3}), {"\"zeros\": got shape [1, 3], expected [2, 3]"}},
      {"ZerosAndZero",
       [](Linear* l) {
         l->Add("zeros", "U8", {2, 3});
       },
       {"\"zeros\": got a tensor, expected none beside"}},
      {"NoZero",
       [](Linear* l) { l->settings.members.erase("zero"); },
       {"\"zeros\": got nothing, expected U8 [groups, N], or one of"}},
      {"ZeroAndSymmetric", With("symmetric", Setting::Literal(true)), {"zero: got 5"}},
      {"ZeroTooLarge", With("zero", 256), {"zero: got 256, expected a whole number from 0 to 255"}},
      {"BitsTooMany", With("bits", 9), {"bits: got 9, expected a whole number from 1 to 8"}},
      {"BitsAreAWord", With("bits", Setting::Typed("four")), {"bits: got \"four\""}},
      {"BlockLargerThanTheMatrix",
       With("group_size", 7),
       {"group_size: got 7, expected -1 or 1 to"}},
      {"GroupOfNothing", With("group_size", 0), {"group_size: got 0"}},
      {"BiasShape",
       [](Linear* l) { l->Add("bias", "F32", {4}); },
       {"\"bias\": got shape [4], expected [3]"}},
  };
}

INSTANTIATE_TEST_SUITE_P(All, PlainRefusal, ::testing::ValuesIn(Refusals()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace awqd
