// compressed-tensors "float-quantized", "nvfp4-pack-quantized" and "mxfp4-pack-quantized": the
// scales of each strategy, and every refusal.
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

// --- FP8 ---

// N = 4, K = 6: every code is 1, scales are 1, 2, 3, 4.
Linear MakeFp8() {
  Linear out = {.format = &kFloatQuantizedFormat};
  out.Set("strategy", Setting::Typed("channel"));
  out.Add("weight", "F8_E4M3", {4, 6});
  out.Add("weight_scale", "F32", {4, 1});
  for (int i = 0; i < 24; ++i) out.Put<uint8_t>("weight", i, 0x38);
  for (int i = 0; i < 4; ++i) out.Put<float>("weight_scale", i, static_cast<float>(i + 1));
  return out;
}

void PutScales(Linear* linear, std::vector<int64_t> shape) {
  linear->Add("weight_scale", "F32", std::move(shape));
  const auto& bytes = linear->tensors["weight_scale"].bytes;
  for (size_t i = 0; i < bytes.size() / 4; ++i) {
    linear->Put<float>("weight_scale", static_cast<int64_t>(i), static_cast<float>(i + 1));
  }
}

// The scheme and the values of W's corners, or the error.
std::string Shown(const Linear& linear) {
  const auto weight = linear.Decode();
  if (!weight.ok()) return std::string(weight.status().message());
  if (!Validate(*weight).ok()) return std::string(Validate(*weight).message());
  return absl::StrCat(ToString(weight->scheme), " ", WeightValue(*weight, 0, 0), " ",
                      WeightValue(*weight, weight->k - 1, 0), " ",
                      WeightValue(*weight, 0, weight->n - 1), " ",
                      WeightValue(*weight, weight->k - 1, weight->n - 1));
}

TEST(FloatQuantizedFormat, ScalesOfEachStrategy) {
  Linear linear = MakeFp8();
  EXPECT_EQ(Shown(linear), "e4m3c+fp32 1 1 4 4");
  linear.settings.members.erase("strategy");
  EXPECT_EQ(Shown(linear), "e4m3c+fp32 1 1 4 4");
  PutScales(&linear, {1});
  EXPECT_EQ(Shown(linear), "e4m3t+fp32 1 1 1 1");
  linear.Set("strategy", Setting::Typed("tensor"));
  EXPECT_EQ(Shown(linear), "e4m3t+fp32 1 1 1 1");
  linear.Set("strategy", Setting::Typed("group"));
  linear.Set("group_size", 3);
  PutScales(&linear, {4, 2});
  EXPECT_EQ(Shown(linear), "e4m3g3+fp32 1 2 7 8");
  linear.Set("group_size", -1);
  PutScales(&linear, {4, 1});
  EXPECT_EQ(Shown(linear), "e4m3c+fp32 1 1 4 4");
  linear.Set("strategy", Setting::Typed("block"));
  linear.Set("block_n", 3);
  linear.Set("block_k", 4);
  PutScales(&linear, {2, 2});
  EXPECT_EQ(Shown(linear), "e4m3b4x3+fp32 1 2 3 4");
  linear.Add("weight_zero_point", "F8_E4M3", {2, 2});
  linear.Add("input_scale", "F32", {1});
  EXPECT_EQ(Shown(linear), "e4m3b4x3+fp32 1 2 3 4");
}

TEST(FloatQuantizedFormat, DeclaredActivations) {
  using enum ActivationQuantization;
  Linear linear = MakeFp8();
  const auto declared = [&](const char* how) {
    linear.Set("activations", Setting::Typed(how));
    const auto weight = linear.Decode();
    EXPECT_TRUE(weight.ok()) << weight.status();
    return weight.ok() ? weight->activations : DeclaredActivations{};
  };
  EXPECT_EQ(linear.Decode()->activations.how, kNone);
  EXPECT_EQ(declared("fp8_dynamic").how, kFloat8PerToken);
  EXPECT_EQ(declared("fp8_blocks").how, kFloat8PerBlock);
  linear.Add("input_scale", "F32", {1});
  linear.Put<float>("input_scale", 0, 0.5f);
  linear.Add("input_zero_point", "F8_E4M3", {1});
  EXPECT_EQ(declared("fp8_static").how, kFloat8Static);
  EXPECT_EQ(declared("fp8_static").scale, 0.5f);
  const auto refused = [&] { return std::string(linear.Decode().status().message()); };
  linear.Put<float>("input_scale", 0, 0);
  EXPECT_THAT(refused(),
              ::testing::HasSubstr("\"input_scale\": got 0, expected a positive number"));
  linear.tensors.erase("input_scale");
  EXPECT_THAT(refused(), ::testing::HasSubstr("\"input_scale\": got nothing"));
  linear.Set("activations", Setting::Typed("dynamic"));
  EXPECT_THAT(refused(), ::testing::HasSubstr("activations: got INT8"));
}

class FloatQuantizedRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(FloatQuantizedRefusal, NamesThePart) { ExpectRefused(MakeFp8(), GetParam()); }

std::vector<Refusal> OfFp8() {
  return {
      {"NoCodes", Without("weight"), {"\"weight\": got nothing, expected F8_E4M3 [N, K]"}},
      {"NoScale", Without("weight_scale"), {"\"weight_scale\": got nothing"}},
      {"CodesDtype", WithDtype("weight", "I8"), {"\"weight\": got dtype I8, expected F8_E4M3"}},
      {"CodesRank", WithShape("weight", {24}), {"\"weight\": got shape [24]"}},
      {"CodesShort", Short("weight"), {"\"weight\": got 23 bytes, expected 24"}},
      {"CodesEmpty", WithShape("weight", {4, 0}), {"\"weight\": got shape [4, 0]"}},
      {"ScaleDtype", WithDtype("weight_scale", "F8_E8M0"), {"\"weight_scale\": got dtype F8_E8M0"}},
      {"ScaleRows", WithShape("weight_scale", {3, 1}), {"\"weight_scale\": got shape [3, 1]"}},
      {"ScaleShort", Short("weight_scale"), {"\"weight_scale\": got 15 bytes, expected 16"}},
      {"ScaleIsNan",
       [](Linear* l) { l->Put<uint32_t>("weight_scale", 2, 0x7fc00000); },
       {"\"weight_scale\": got NaN at element 2"}},
      {"OneForAChannel",
       WithShape("weight_scale", {1}),
       {"\"weight_scale\": got shape [1], expected [4, 1] (N), as strategy is \"channel\""}},
      {"ChannelsForATensor",
       With("strategy", Setting::Typed("tensor")),
       {"\"weight_scale\": got shape [4, 1], expected [1]", "as strategy is \"tensor\""}},
      {"GroupWithoutSize", With("strategy", Setting::Typed("group")), {"group_size: got nothing"}},
      {"BlockWithoutSize", With("strategy", Setting::Typed("block")), {"block_n: got nothing"}},
      {"HalfABlock",
       [](Linear* l) {
         l->settings.members.clear();
         l->Set("block_n", 2);
       },
       {"block_k: got nothing"}},
      {"Blocks",
       [](Linear* l) {
         l->Set("strategy", Setting::Typed("block"));
         l->Set("block_n", 2);
         l->Set("block_k", 6);
       },
       {"\"weight_scale\": got shape [4, 1], expected [2, 1]"}},
      {"GroupOfZero", With("group_size", 0), {"group_size: got 0"}},
      {"HugeBlock", With("block_n", int64_t{1} << 40), {"block_n: got 1099511627776"}},
      {"Strategy", With("strategy", Setting::Typed("token")), {"strategy: got \"token\""}},
      {"ZeroPoint",
       [](Linear* l) {
         l->Add("weight_zero_point", "F8_E4M3", {4, 1});
         l->Put<uint8_t>("weight_zero_point", 3, 0x38);
       },
       {"\"weight_zero_point\": got other values than 0"}},
      {"ZeroPointShape",
       [](Linear* l) {
         l->Add("weight_zero_point", "F8_E4M3", {1, 4});
       },
       {"\"weight_zero_point\": got shape [1, 4], expected [4, 1]"}},
      {"BiasShape", [](Linear* l) { l->Add("bias", "F32", {3}); }, {"\"bias\": got shape [3]"}},
  };
}

const auto kName = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(All, FloatQuantizedRefusal, ::testing::ValuesIn(OfFp8()), kName);

// --- FP4 ---

// N = 2, K = 64: codes of 1, scales of 1, a divisor of 4.
Linear MakeNvfp4() {
  Linear out = {.format = &kNvfp4PackQuantizedFormat};
  out.Add("weight_packed", "U8", {2, 32});
  out.Add("weight_scale", "F8_E4M3", {2, 4});
  out.Add("weight_global_scale", "F32", {1});
  for (int i = 0; i < 64; ++i) out.Put<uint8_t>("weight_packed", i, 0x22);
  for (int i = 0; i < 8; ++i) out.Put<uint8_t>("weight_scale", i, 0x38);
  out.Put<float>("weight_global_scale", 0, 4);
  return out;
}

// The same with groups of 32 and no divisor; scales of 2.
Linear MakeMxfp4() {
  Linear out = MakeNvfp4();
  out.format = &kMxfp4PackQuantizedFormat;
  out.tensors.erase("weight_global_scale");
  out.Add("weight_scale", "U8", {2, 2});
  for (int i = 0; i < 4; ++i) out.Put<uint8_t>("weight_scale", i, 128);
  return out;
}

TEST(Nvfp4PackQuantizedFormat, TheGlobalScaleDivides) {
  Linear linear = MakeNvfp4();
  linear.Put<uint8_t>("weight_packed", 31, 0xf2);  // n = 0, k = 63: -6
  linear.Put<uint8_t>("weight_scale", 3, 0x40);    // n = 0, group 3: 2
  EXPECT_EQ(Shown(linear), "e2m1g16+e4m3*t 0.25 -3 0.25 0.25");
  linear.Add("weight_global_scale", "F32", {});
  linear.Put<float>("weight_global_scale", 0, 2);
  linear.Set("group_size", 16);
  EXPECT_EQ(Shown(linear), "e2m1g16+e4m3*t 0.5 -6 0.5 0.5");
}

TEST(Mxfp4PackQuantizedFormat, ScalesArePowersOfTwo) {
  Linear linear = MakeMxfp4();
  linear.Put<uint8_t>("weight_scale", 3, 120);  // n = 1, group 1: 2^-7
  EXPECT_EQ(Shown(linear), "e2m1g32+e8m0 2 2 2 0.0078125");
}

class Nvfp4PackQuantizedRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(Nvfp4PackQuantizedRefusal, NamesThePart) { ExpectRefused(MakeNvfp4(), GetParam()); }

std::function<void(Linear*)> Divisor(float value) {
  return [=](Linear* l) { l->Put<float>("weight_global_scale", 0, value); };
}

std::vector<Refusal> OfNvfp4() {
  return {
      {"NoCodes", Without("weight_packed"), {"\"weight_packed\": got nothing"}},
      {"NoScale", Without("weight_scale"), {"\"weight_scale\": got nothing, expected F8_E4M3"}},
      {"NoDivisor", Without("weight_global_scale"), {"\"weight_global_scale\": got nothing"}},
      {"CodesDtype", WithDtype("weight_packed", "I8"), {"\"weight_packed\": got dtype I8"}},
      {"CodesRank", WithShape("weight_packed", {64}), {"\"weight_packed\": got shape [64]"}},
      {"CodesShort", Short("weight_packed"), {"\"weight_packed\": got 63 bytes, expected 64"}},
      {"ScaleDtype", WithDtype("weight_scale", "F16"), {"\"weight_scale\": got dtype F16"}},
      {"ScaleGroups",
       WithShape("weight_scale", {2, 2}),
       {"\"weight_scale\": got 2 groups, expected 4 (K = 64 in groups of 16)"}},
      {"ScaleRows", WithShape("weight_scale", {3, 4}), {"got shape [3, 4], expected [2, 4]"}},
      {"ScaleIsNan",
       [](Linear* l) { l->Put<uint8_t>("weight_scale", 5, 0x7f); },
       {"\"weight_scale\": got NaN at element 5"}},
      {"DivisorOfZero", Divisor(0), {"\"weight_global_scale\": got 0, expected a positive number"}},
      {"DivisorNegative", Divisor(-1), {"\"weight_global_scale\": got -1"}},
      {"DivisorInfinite", Divisor(INFINITY), {"\"weight_global_scale\": got inf"}},
      {"DivisorTooSmall", Divisor(1e-40f), {"\"weight_global_scale\": got"}},
      {"DivisorIsNan", Divisor(NAN), {"\"weight_global_scale\": got NaN"}},
      {"Divisors", WithShape("weight_global_scale", {2}), {"got shape [2], expected [1]"}},
      {"GroupSize", With("group_size", 32), {"group_size: got 32, expected 16"}},
  };
}

INSTANTIATE_TEST_SUITE_P(All, Nvfp4PackQuantizedRefusal, ::testing::ValuesIn(OfNvfp4()), kName);

class Mxfp4PackQuantizedRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(Mxfp4PackQuantizedRefusal, NamesThePart) { ExpectRefused(MakeMxfp4(), GetParam()); }

std::vector<Refusal> OfMxfp4() {
  return {
      {"NoScale", Without("weight_scale"), {"\"weight_scale\": got nothing, expected U8"}},
      {"ScaleDtype", WithDtype("weight_scale", "I8"), {"\"weight_scale\": got dtype I8"}},
      {"ScaleGroups", WithShape("weight_scale", {2, 4}), {"got 4 groups, expected 2 (K = 64"}},
      {"ScaleShort", Short("weight_scale"), {"\"weight_scale\": got 3 bytes, expected 4"}},
      {"ScaleIsNan",
       [](Linear* l) { l->Put<uint8_t>("weight_scale", 1, 0xff); },
       {"\"weight_scale\": got NaN at element 1"}},
      {"NoWholeGroup", WithShape("weight_packed", {2, 24}), {"group_size: got 32", "K = 48"}},
      {"GroupSize", With("group_size", 16), {"group_size: got 16, expected 32"}},
  };
}

INSTANTIATE_TEST_SUITE_P(All, Mxfp4PackQuantizedRefusal, ::testing::ValuesIn(OfMxfp4()), kName);

}  // namespace
}  // namespace awqd
