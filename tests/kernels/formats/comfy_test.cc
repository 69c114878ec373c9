// "comfy": its settings, its tensors, and every refusal. Goldens have the values of the package.
#include <cmath>
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

Linear Of(const std::string& format) {
  Linear out = {.format = &kComfyFormat};
  out.Set("format", Setting::Typed(format));
  return out;
}

std::function<void(Linear*)> Adding(std::string name, std::string dtype,
                                    std::vector<int64_t> shape) {
  return [=](Linear* l) { l->Add(name, dtype, shape); };
}

// N = 16, K = 32: the code of (n, k) is (n + k) % 16, group g of column n has scale 2^g, times 3.
Linear MakeNvfp4() {
  Linear out = Of("nvfp4");
  out.Add("weight", "U8", {16, 16});
  out.Add("weight_scale", "F8_E4M3", {128, 4});
  out.Add("weight_scale_2", "F32", {});
  for (int i = 0; i < 256; ++i) {
    const int first = i / 16 + i % 16 * 2;
    out.Put<uint8_t>("weight", i, static_cast<uint8_t>(first % 16 << 4 | (first + 1) % 16));
  }
  for (int n = 0; n < 16; ++n) {
    for (int g = 0; g < 2; ++g) {
      out.Put<uint8_t>("weight_scale", n * 16 + g, g == 0 ? 0x38 : 0x40);
    }
  }
  out.Put<float>("weight_scale_2", 0, 3);
  return out;
}

// N = 2, K = 16 in blocks of 4: code (n, k) is 7 * k - n - 52.
Linear MakeRotated() {
  Linear out = Of("int8_tensorwise");
  out.Set("convrot", Setting::Typed("true"));
  out.Set("convrot_groupsize", 4);
  out.Add("weight", "I8", {2, 16});
  out.Add("weight_scale", "F32", {2, 1});
  for (int i = 0; i < 32; ++i) {
    out.Put<int8_t>("weight", i, static_cast<int8_t>(i % 16 * 7 - i / 16 - 52));
  }
  out.Put<float>("weight_scale", 0, 0.5f);
  out.Put<float>("weight_scale", 1, 2);
  return out;
}

Linear MakeLevels() {
  Linear out = Of("asym_w4a8_int8");
  out.Set("group_size", 8);
  out.Set("convrot_groupsize", 4);
  out.Add("weight", "I8", {2, 8});
  out.Add("weight_s_rel", "F8_E4M3", {2, 2});
  out.Add("weight_s_channel", "F32", {2});
  out.Add("weight_codebook", "F32", {16});
  return out;
}

Linear MakeAwq() {
  Linear out = Of("awq_w4a16");
  out.Set("group_size", 4);
  out.Add("weight", "I8", {3, 4});
  out.Add("weight_scale", "BF16", {2, 3});
  out.Add("weight_zeros", "BF16", {2, 3});
  return out;
}

TEST(ComfyFormat, Nvfp4HasItsFirstCodeInTheHighHalf) {
  const auto weight = MakeNvfp4().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "e2m1g16+e4m3*t");
  constexpr float kValues[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  for (int k = 0; k < 32; ++k) {
    for (int n = 0; n < 16; ++n) {
      const int code = (n + k) % 16;
      const float value = (code < 8 ? 1.0f : -1.0f) * kValues[code % 8];
      EXPECT_EQ(WeightValue(*weight, k, n), value * (k < 16 ? 1 : 2) * 3);
    }
  }
}

TEST(ComfyFormat, ABiasTellsHowManyRowsArePadding) {
  Linear linear = MakeNvfp4();
  linear.Add("bias", "F32", {9});
  const auto cut = linear.Decode();
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(cut->n, 9);
  EXPECT_EQ(WeightValue(*cut, 31, 8), WeightValue(*MakeNvfp4().Decode(), 31, 8));
  linear.Add("bias", "F8_E4M3", {16});
  linear.Put<uint8_t>("bias", 3, 0x40);
  EXPECT_EQ(linear.Decode()->bias.at(3), 2.0f);
  linear.Add("pre_quant_scale", "BF16", {32});
  EXPECT_EQ(linear.Decode()->factor.size(), 32u);
}

// Scales of all rows and groups, each another power of two, in two tiles each way.
TEST(ComfyFormat, ScalesLieInTiles) {
  Linear linear = Of("mxfp8");
  linear.Add("weight", "F8_E4M3", {160, 192});
  linear.Add("weight_scale", "U8", {256, 8});
  for (int i = 0; i < 160 * 192; ++i) linear.Put<uint8_t>("weight", i, 0x38);
  const auto exponent = [](int n, int g) { return (n * 7 + g * 31) % 64 - 32; };
  for (int n = 0; n < 160; ++n) {
    for (int g = 0; g < 6; ++g) {
      const int tile = n / 128 * 2 + g / 4;
      const int in_tile = n % 32 * 16 + n % 128 / 32 * 4 + g % 4;
      linear.Put<uint8_t>("weight_scale", tile * 512 + in_tile,
                          static_cast<uint8_t>(127 + exponent(n, g)));
    }
  }
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "e4m3g32+e8m0");
  for (int n = 0; n < 160; ++n) {
    for (int k = 0; k < 192; ++k) {
      ASSERT_EQ(WeightValue(*weight, k, n), std::ldexp(1.0f, exponent(n, k / 32))) << n << " " << k;
    }
  }
}

// The product of a rotated x is that of x with the matrix of the package.
TEST(ComfyFormat, RotationIsTheTransformOfActivations) {
  const auto weight = MakeRotated().Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  EXPECT_EQ(ToString(weight->scheme), "w8cs+fp32");
  EXPECT_EQ(weight->hadamard, (Hadamard{4, 0.5f}));
  EXPECT_TRUE(weight->order.empty());
  constexpr int kFour[4][4] = {{1, 1, 1, -1}, {1, 1, -1, 1}, {1, -1, 1, 1}, {-1, 1, 1, 1}};
  for (int in = 0; in < 16; ++in) {
    std::vector<float> token(16);
    token[in] = weight->factor[in];
    for (int block = 0; block < 16; block += 4) TransformBlock(weight->hadamard, &token[block]);
    for (int n = 0; n < 2; ++n) {
      float got = 0, expected = 0;
      for (int k = 0; k < 16; ++k) {
        got += token[k] * WeightValue(*weight, k, n);
        const auto code = static_cast<float>(k * 7 - n - 52);
        if (k / 4 == in / 4) {
          expected += 0.5f * static_cast<float>(kFour[in % 4][k % 4]) * code * (n == 0 ? 0.5f : 2);
        }
      }
      EXPECT_EQ(got, expected) << in;
    }
  }
}

TEST(ComfyFormat, ALeastCodeThatIsNegatedIsRefused) {
  Linear linear = MakeRotated();
  linear.Put<int8_t>("weight", 8, -128);
  EXPECT_TRUE(linear.Decode().ok()) << "its column has a positive sign";
  linear.Put<int8_t>("weight", 11, -128);
  EXPECT_THAT(std::string(linear.Decode().status().message()),
              HasSubstr("tensor \"weight\": got -128 in column 11, expected -127 to 127"));
  Linear four = Of("convrot_w4a4");
  four.Set("convrot_groupsize", 4);
  four.Add("weight", "I8", {3, 4});
  four.Add("weight_scale", "F32", {3});
  EXPECT_EQ(ToString(four.Decode()->scheme), "w4cs+fp32");
  four.Put<uint8_t>("weight", 1, 0x80);
  EXPECT_THAT(std::string(four.Decode().status().message()),
              HasSubstr("got -8 in column 3, expected -7 to 7"));
}

TEST(ComfyFormat, LevelsAreRoundedToEven) {
  Linear linear = MakeLevels();
  linear.Set("convrot_groupsize", 16);
  linear.Put<float>("weight_codebook", 0, 2.5f);
  linear.Put<float>("weight_codebook", 1, -300);
  for (int i = 0; i < 4; ++i) linear.Put<uint8_t>("weight_s_rel", i, 0x38);
  linear.Put<float>("weight_s_channel", 1, 0.25f);
  linear.Put<uint8_t>("weight", 8, 0x10);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(WeightValue(*weight, 0, 1), 0.5f);
  EXPECT_EQ(WeightValue(*weight, 2, 1), -127 * 0.25f) << "column 1 is row 2 of Sylvester's matrix";
}

TEST(ComfyFormat, AwqHasZerosAfterItsScale) {
  Linear linear = MakeAwq();
  linear.Put<uint16_t>("weight_scale", 4, 0x4000);  // 2
  linear.Put<uint16_t>("weight_zeros", 4, 0x4040);  // 3
  linear.Put<uint8_t>("weight", 4 + 2, 0xf1);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4g4o:fp32+bf16");
  EXPECT_EQ(WeightValue(*weight, 4, 1), (1 - 8) * 2 + 3);
  EXPECT_EQ(WeightValue(*weight, 5, 1), (15 - 8) * 2 + 3);
}

TEST(ComfyFormat, Fp8OfTheYearsBefore) {
  Linear linear = Of("float8_e4m3fn");
  linear.Add("weight", "F8_E4M3", {2, 4});
  linear.Add("scale_weight", "F32", {1});
  linear.Put<float>("scale_weight", 0, 3);
  linear.Put<uint8_t>("weight", 0, 0x38);
  EXPECT_EQ(WeightValue(*linear.Decode(), 0, 0), 3.0f);
  linear.Add("weight_scale", "F32", {1});
  EXPECT_THAT(std::string(linear.Decode().status().message()),
              HasSubstr("\"scale_weight\": got it beside \"weight_scale\""));
  linear.Set("scaled", Setting::Typed("false"));
  EXPECT_THAT(std::string(linear.Decode().status().message()), HasSubstr("expected none with"));
  linear.tensors.erase("weight_scale");
  linear.tensors.erase("scale_weight");
  EXPECT_EQ(WeightValue(*linear.Decode(), 0, 0), 1.0f);
}

TEST(ComfyFormat, Refusals) {
  const std::vector<Refusal> nvfp4 = {
      {"format", With("format", Setting::Typed("float8_e5m2")), {"format: got \"float8_e5m2\""}},
      {"rotation",
       With("convrot", Setting::Typed("true")),
       {"convrot: got true, expected false with format nvfp4"}},
      {"no weight", Without("weight"), {"\"weight\": got nothing, expected U8 [N, K/2]"}},
      {"no scales", Without("weight_scale"), {"\"weight_scale\": got nothing"}},
      {"no outer", Without("weight_scale_2"), {"\"weight_scale_2\": got nothing"}},
      {"dtype", WithDtype("weight", "I8"), {"\"weight\": got dtype I8, expected U8"}},
      {"short", Short("weight"), {"\"weight\": got 255 bytes"}},
      {"K", WithShape("weight", {16, 4}), {"expected a K in groups of 16, not 8"}},
      {"not padded",
       WithShape("weight_scale", {16, 2}),
       {"\"weight_scale\": got shape [16, 2], expected [128, 4] ([16, 2] (N, groups) in tiles"}},
      {"scales' dtype", WithDtype("weight_scale", "F8_E8M0"), {"got dtype F8_E8M0"}},
      {"NaN", [](Linear* l) { l->Put<uint8_t>("weight_scale", 17, 0x7f); }, {"got NaN"}},
      {"NaN outer",
       [](Linear* l) { l->Put<uint32_t>("weight_scale_2", 0, 0x7fc00000); },
       {"\"weight_scale_2\": got NaN"}},
      {"factor",
       Adding("pre_quant_scale", "F16", {31}),
       {"\"pre_quant_scale\": got shape [31], expected [32] (K)"}},
      {"another's",
       Adding("weight_zeros", "F32", {2}),
       {"\"weight_zeros\": got it, expected none"}},
      {"bias", Adding("bias", "F16", {17}), {"\"bias\": got shape [17]"}},
  };
  for (const Refusal& refusal : nvfp4) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeNvfp4(), refusal);
  }
  const std::vector<Refusal> rotated = {
      {"no power of 4",
       With("convrot_groupsize", 8),
       {"convrot_groupsize: got 8, expected a power"}},
      {"too large", With("convrot_groupsize", 64), {"got 64, expected a divisor of K = 16"}},
      {"out of range", With("convrot_groupsize", 3), {"convrot_groupsize: got 3"}},
      {"a word", With("convrot_groupsize", Setting::Typed("x")), {"convrot_groupsize: got \"x\""}},
      {"rows", WithShape("weight_scale", {3, 1}), {"\"weight_scale\": got shape [3, 1]"}},
      {"no format", With("format", Setting::Typed("")), {"format: got nothing"}},
  };
  for (const Refusal& refusal : rotated) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeRotated(), refusal);
  }
  const std::vector<Refusal> levels = {
      {"groups",
       WithShape("weight_s_rel", {2, 3}),
       {"expected rows of K = 24 codes of 4 or 6 bits"}},
      {"rows", WithShape("weight_s_rel", {3, 2}), {"got shape [3, 2], expected [2, 2]"}},
      {"channels", WithShape("weight_s_channel", {3}), {"got shape [3], expected [2] (N)"}},
      {"codebook", WithShape("weight_codebook", {8}), {"got shape [8], expected [16]"}},
      {"NaN",
       [](Linear* l) { l->Put<uint32_t>("weight_codebook", 2, 0x7fc00000); },
       {"\"weight_codebook\": got nan"}},
      {"six bits", WithShape("weight", {2, 12}), {"\"weight_codebook\": got it, expected none"}},
      {"group", With("group_size", 0), {"group_size: got 0"}},
  };
  for (const Refusal& refusal : levels) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeLevels(), refusal);
  }
  const std::vector<Refusal> awq = {
      {"group", With("group_size", 3), {"expected a K in groups of 3, not 8"}},
      {"zeros", WithShape("weight_zeros", {3, 2}), {"\"weight_zeros\": got shape [3, 2]"}},
      {"infinite",
       [](Linear* l) { l->Put<uint16_t>("weight_scale", 0, 0x7f80); },
       {"\"weight_scale\": got inf"}},
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
Setting Layer(const std::string& format) { return Object({{"format", Setting::String(format)}}); }

TEST(ComfyFormat, OneRuleForLayersOfTheSameSettings) {
  Setting params = Layer("int8_tensorwise");
  params.members["params"] = Object({{"convrot", Setting::Literal(true)}});
  Setting flat = Layer("int8_tensorwise");
  flat.members["convrot"] = Setting::Literal(true);
  flat.members["convrot_groupsize"] = Setting::Literal(int64_t{256});
  flat.members["full_precision_matrix_mult"] = Setting::Literal(true);
  const Setting config = Object(
      {{"quant_method", Setting::String("comfy_quant")},
       {"layers",
        Object({{"a", params}, {"b", flat}, {"c", Layer("nvfp5")}, {"d", Layer("mxfp8")}})}});
  const auto found = FindFormat(config);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->format, &kComfyFormat);
  ASSERT_EQ(found->config.rules.size(), 3u);
  for (const LinearRule& rule : found->config.rules) {
    const std::string& first = rule.targets.at(0).text;
    EXPECT_EQ(rule.targets.size(), first == "a" ? 2u : 1u);
    EXPECT_EQ(rule.unread.ok(), first != "c") << rule.unread;
    EXPECT_EQ(absl::IsUnimplemented(rule.unread), first == "c");
    EXPECT_EQ(rule.settings.members.contains("convrot_groupsize"), first == "a");
  }
  EXPECT_THAT(std::string(FindFormat(Object({{"quant_method", Setting::String("comfy_quant")}}))
                              .status()
                              .message()),
              HasSubstr("layers: got nothing"));
}

}  // namespace
}  // namespace awqd
