// AutoAWQ's versions gemv and gemv_fast: places of codes, padded groups, zeros, and every refusal.
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/half.h"
#include "kernels/exact.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

// K = 256 in 4 groups of 64, padded to 16; N = 8. Codes 0, zero points 0, scales 1.
Linear MakeGemv() {
  Linear out = {.format = &kAwqGemvFormat};
  out.Set("group_size", 64);
  out.Add("qweight", "I32", {8, 32});
  out.Add("qzeros", "I32", {8, 2});
  out.Add("scales", "F16", {8, 16});
  for (int col = 0; col < 8; ++col) {
    for (int group = 0; group < 4; ++group) out.Put<uint16_t>("scales", 16 * col + group, 0x3c00);
  }
  return out;
}

Linear MakeFast() {
  Linear out = {.format = &kAwqGemvFastFormat};
  out.Set("group_size", 64);
  out.Add("qweight", "I16", {2, 256});
  out.Add("scales", "F16", {16, 8});
  out.Add("qzeros", "F16", {16, 8});
  for (int i = 0; i < 4 * 8; ++i) out.Put<uint16_t>("scales", i, 0x3c00);
  return out;
}

void Widen(Linear* linear, const std::string& dtype) {
  for (auto& [name, tensor] : linear->tensors) {
    if (tensor.dtype == "F16") tensor.dtype = dtype;
  }
}

TEST(AwqGemvFormat, PinnedWords) {
  Linear linear = MakeGemv();
  linear.Put<uint32_t>("qweight", 3 * 32 + 9, 0x76543210);  // column 3, rows 72 to 79
  linear.Put<uint32_t>("qzeros", 2 * 3, 0x0000d5e2);        // its groups 0 to 3
  linear.Put<uint16_t>("scales", 16 * 3 + 1, 0x4000);       // group 1
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w4g64z");
  for (int i = 0; i < 8; ++i) EXPECT_EQ(weight->Code(72 + i, 3), i);
  EXPECT_EQ(weight->Code(72 + 7, 2), 0);
  const int zeros[] = {2, 14, 5, 13};
  for (int group = 0; group < 4; ++group) EXPECT_EQ(weight->Zero(group, 3), zeros[group]);
  EXPECT_EQ(WeightValue(*weight, 79, 3), (7 - 14) * 2);
}

// The word and the bits of W[row, col] in version gemv_fast.
TEST(AwqGemvFastFormat, EveryCode) {
  std::mt19937 random(4);
  for (const auto& [k, n] : {std::pair{64, 4}, {192, 8}, {128, 20}}) {
    for (const bool as_words : {false, true}) {
      Linear linear = MakeFast();
      linear.Set("group_size", k);
      linear.Reshape("qweight", {n / 4, k});
      linear.Reshape("scales", {k < 128 ? 16 : 8, n});
      linear.Reshape("qzeros", {k < 128 ? 16 : 8, n});
      for (int i = 0; i < n; ++i) linear.Put<uint16_t>("scales", i, 0x3c00);
      std::vector<int> codes;
      for (int i = 0; i < k * n; ++i) {
        const int row = i / n, col = i % n;
        codes.push_back(static_cast<int>(random() % 16));
        const int place = row % 64 / 32 * 32 + row % 8 / 2 * 8 + row % 2 * 4 + row % 32 / 8;
        const int number = col / 4 * k + row / 64 * 64 + col % 4 * 16 + place / 4;
        uint8_t& byte = linear.tensors["qweight"].bytes[2 * number + place % 4 / 2];
        byte = static_cast<uint8_t>(byte | codes.back() << (place % 2 * 4));
      }
      if (as_words) {
        linear.tensors["qweight"].dtype = "I32";
        linear.tensors["qweight"].shape[1] /= 2;
      }
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      int wrong = 0;
      for (int i = 0; i < k * n; ++i) wrong += weight->Code(i / n, i % n) != codes[i];
      EXPECT_EQ(wrong, 0) << k << " " << n;
    }
  }
}

// Random scales, including small ones: the writer's rounded value gives the zero point again, in
// both types.
TEST(AwqGemvFastFormat, ZeroPointsComeBack) {
  std::mt19937 random(9);
  for (const std::string dtype : {"F16", "BF16"}) {
    for (const std::string name : {"qzeros", "scaled_zeros"}) {
      Linear linear = MakeFast();
      if (name != "qzeros") linear.tensors[name] = linear.tensors["qzeros"];
      if (name != "qzeros") linear.tensors.erase("qzeros");
      Widen(&linear, dtype);
      std::vector<int> zeros;
      for (int i = 0; i < 32; ++i) {
        zeros.push_back(static_cast<int>(random() % 16));
        const float size = std::ldexp(1.0f + static_cast<float>(random() % 1024) / 1024, -i / 2);
        const auto bits = [&](float x) { return dtype == "F16" ? FloatToHalf(x) : FloatToBf16(x); };
        const uint16_t scale = bits(size);
        const float exact = dtype == "F16" ? HalfToFloat(scale) : Bf16ToFloat(scale);
        linear.Put<uint16_t>("scales", i, scale);
        linear.Put<uint16_t>(name, i, bits(-exact * static_cast<float>(zeros.back())));
      }
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      EXPECT_EQ(ToString(weight->scheme), dtype == "F16" ? "w4g64z" : "w4g64z+bf16");
      for (int i = 0; i < 32; ++i) EXPECT_EQ(weight->Zero(i / 8, i % 8), zeros[i]);
    }
  }
}

TEST(AwqGemvFastFormat, OtherZerosStayReal) {
  Linear linear = MakeFast();
  linear.Put<uint16_t>("qzeros", 8 + 5, FloatToHalf(-2.25f));
  linear.Put<uint16_t>("qzeros", 8 + 6, FloatToHalf(-3.0f));
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w4g64o");
  EXPECT_EQ(WeightValue(*weight, 64, 5), -2.25f);
  EXPECT_EQ(WeightValue(*weight, 64, 6), -3.0f);
  EXPECT_EQ(WeightValue(*weight, 0, 0), 0.0f);
  linear.Put<uint16_t>("qzeros", 8 + 5, FloatToHalf(-2.0f));
  EXPECT_EQ(ToString(linear.Decode()->scheme), "w4g64z");
}

TEST(AwqGemvFormats, WithoutZeroPointsTheyAreTheMiddle) {
  for (Linear linear : {MakeGemv(), MakeFast()}) {
    linear.Set("zero_point", Setting::Literal(false));
    for (int i = 0; i < 4 * 8; ++i) {
      if (linear.format == &kAwqGemvFastFormat) linear.Put<uint16_t>("qzeros", i, 0xc800);  // -8
    }
    if (linear.format == &kAwqGemvFormat) {
      for (int i = 0; i < 16; ++i) linear.Put<uint32_t>("qzeros", i, 0x00008888);
    }
    auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(ToString(weight->scheme), "w4g64s");
    EXPECT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    linear.tensors.erase("qzeros");
    weight = linear.Decode();
    EXPECT_EQ(weight.ok(), linear.format == &kAwqGemvFormat) << weight.status();
  }
}

TEST(AwqGemvFormats, PaddingOfEachGroupSize) {
  struct Case {
    int64_t k, group, padded;
  };
  for (const Case& c : {Case{1024, 16, 64},
                        {1280, 16, 128},
                        {256, 32, 32},
                        {64, 64, 16},
                        {1024, 64, 16},
                        {1088, 64, 32},
                        {1024, 128, 8},
                        {1152, 128, 16},
                        {1024, 512, 8},
                        {64, -1, 16},
                        {192, -1, 8}}) {
    Linear linear = MakeGemv();
    const int64_t groups = c.group == -1 ? 1 : c.k / c.group;
    linear.Set("group_size", c.group);
    linear.Reshape("qweight", {8, c.k / 8});
    linear.Reshape("qzeros", {8, c.padded / 8});
    linear.Reshape("scales", {8, c.padded});
    for (int64_t i = 0; i < 8 * groups; ++i) {
      linear.Put<uint16_t>("scales", i / groups * c.padded + i % groups, 0x3c00);
    }
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->groups(), groups) << c.k << " " << c.group;
  }
}

std::vector<Refusal> Refusals(const std::string& codes, const std::string& zeros_dtype) {
  return {
      {"bits", With("bits", 8), {"bits: got 8, expected 4"}},
      {"version",
       With("version", Setting::String("gemm")),
       {"version: got \"gemm\", expected \"ge"}},
      {"no codes", Without("qweight"), {"\"qweight\": got nothing, expected " + codes}},
      {"no scales", Without("scales"), {"\"scales\": got nothing, expected F16 or BF16 ["}},
      {"no zeros", Without("qzeros"), {"\"qzeros\": got nothing, expected " + zeros_dtype}},
      {"type of codes", WithDtype("qweight", "F16"), {"\"qweight\": got dtype F16"}},
      {"type of scales", WithDtype("scales", "I32"), {"\"scales\": got dtype I32"}},
      {"type of zeros", WithDtype("qzeros", "U8"), {"\"qzeros\": got dtype U8"}},
      {"rank", WithShape("qweight", {64}), {"\"qweight\": got shape [64], expected rank 2"}},
      {"nothing", WithShape("qweight", {0, 32}), {"\"qweight\": got shape [0, 32]", "at least 1"}},
      {"missing codes", Short("qweight"), {"\"qweight\": got 1023 bytes, expected 1024"}},
      {"missing scales", Short("scales"), {"\"scales\": got 255 bytes, expected 256"}},
      {"missing zeros", Short("qzeros"), {"\"qzeros\": got "}},
      {"scales", WithShape("scales", {8, 8}), {"\"scales\": got shape [8, 8]", "groups of 64"}},
      {"zeros", WithShape("qzeros", {1, 2}), {"\"qzeros\": got shape [1, 2]"}},
      {"no group size",
       [](Linear* l) { l->settings.members.erase("group_size"); },
       {"group_size: got nothing", "padded"}},
      {"group past K", With("group_size", 512), {"group_size: got 512", "a divisor of K = 256"}},
      {"uneven groups", With("group_size", 48), {"group_size: got 48", "a divisor of K = 256"}},
      {"odd group", With("group_size", 8), {"group_size: got 8, expected -1, 16, 32, 64"}},
      {"smaller group", With("group_size", 32), {"\"scales\": got shape", "groups of 32"}},
      {"larger group", With("group_size", 128), {"\"scales\": got shape", "groups of 128"}},
      {"NaN", [](Linear* l) { l->Put<uint16_t>("scales", 1, 0x7e00); }, {"NaN at element 1"}},
      {"bias", [](Linear* l) { l->Add("bias", "F16", {3}); }, {"tensor \"bias\": got shape [3]"}},
  };
}

TEST(AwqGemvFormat, Refusals) {
  std::vector<Refusal> refusals = Refusals("I32 [N, K/8]", "I32 [N, padded groups/8]");
  const std::vector<Refusal> own = {
      {"scale in the padding",
       [](Linear* l) { l->Put<uint16_t>("scales", 16 * 2 + 4, 0x3c00); },
       {"\"scales\": got a scale in group 4 of column 2, expected 0: there are 4 groups of 64"}},
      {"no scales of a group",
       [](Linear* l) {
         for (int col = 0; col < 8; ++col) l->Put<uint16_t>("scales", 16 * col + 3, 0x8000);
       },
       {"\"scales\": got 0 in every column of group 3, expected scales of 4 groups of 64"}},
      {"zero point",
       With("zero_point", Setting::Literal(false)),
       {"\"qzeros\": got zero point 0 at [0, 0], expected 8, as zero_point is false"}},
  };
  refusals.insert(refusals.end(), own.begin(), own.end());
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeGemv(), refusal);
  }
}

TEST(AwqGemvFastFormat, Refusals) {
  std::vector<Refusal> refusals = Refusals("I16 [N/4, K]", "F16 or BF16 [padded groups, N]");
  const auto zero = [](float value) {
    return [=](Linear* l) { l->Put<uint16_t>("qzeros", 8 + 2, FloatToHalf(value)); };
  };
  const std::vector<Refusal> own = {
      {"both zeros",
       [](Linear* l) { l->tensors["scaled_zeros"] = l->tensors["qzeros"]; },
       {"\"scaled_zeros\": got a tensor, expected none beside \"qzeros\""}},
      {"types", WithDtype("qzeros", "BF16"), {"\"qzeros\": got dtype BF16, expected F16, as"}},
      {"K", WithShape("qweight", {2, 96}), {"\"qweight\": got K = 96, expected a multiple of 64"}},
      {"sign", zero(3), {"\"qzeros\": got 3 at [1, 2] of scale 1, expected minus 0 to 15 times"}},
      {"large", zero(-16), {"\"qzeros\": got -16 at [1, 2] of scale 1"}},
      {"infinite", zero(-INFINITY), {"\"qzeros\": got -inf at [1, 2]"}},
      {"NaN zero", zero(NAN), {"\"qzeros\": got NaN at element 10"}},
      {"zero of no scale",
       [](Linear* l) {
         l->Put<uint16_t>("scales", 10, 0);
         l->Put<uint16_t>("qzeros", 10, 0xbc00);
       },
       {"\"qzeros\": got -1 at [1, 2] of scale 0"}},
      {"zero point",
       With("zero_point", Setting::Literal(false)),
       {"\"qzeros\": got zero point 0 at [0, 0], expected 8, as zero_point is false"}},
      {"real zero",
       [&](Linear* l) {
         zero(-2.25f)(l);
         l->Set("zero_point", Setting::Literal(false));
       },
       {"\"qzeros\": got no zero point at [1, 2]", "as zero_point is false"}},
  };
  refusals.insert(refusals.end(), own.begin(), own.end());
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeFast(), refusal);
  }
}

}  // namespace
}  // namespace awqd
