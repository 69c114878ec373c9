// Gemlite's packing: pinned words, both ways, the resulting zeros and scales, and every refusal.
#include "kernels/formats/gemlite.h"

#include <random>
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

constexpr int kWidths[] = {1, 2, 3, 4, 8};

// 4 bits, N = 4, K = 64: 8 words a row. Every code 0, one scale, a zero of 7.
Linear MakeLinear() {
  Linear out = {.format = &kGemliteFormat};
  out.Set("bits", 4);
  out.Add("qweight", "I32", {4, 8});
  out.Add("scales", "F32", {1});
  out.Put<float>("scales", 0, 4.0f);
  out.Add("zeros", "I32", {1});
  out.Put<int32_t>("zeros", 0, 7);
  return out;
}

std::string Described(const Linear& linear) {
  const auto weight = linear.Decode();
  if (!weight.ok()) return std::string(weight.status().message());
  const absl::Status valid = Validate(*weight);
  return valid.ok() ? ToString(weight->scheme) : std::string(valid.message());
}

// Codes 0, 32, 64, ... 224 of the flat W_q are in word 0, the first in the upper bits. With rows of
// 64 codes these are k = 0 and 32 of the first four rows. Word 1 has their neighbours.
TEST(GemliteFormat, PinnedWords) {
  Linear linear = MakeLinear();
  linear.Put<uint32_t>("qweight", 0, 0x12345678);
  linear.Put<uint32_t>("qweight", 1, 0xf0000000);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->k, 64);
  EXPECT_EQ(weight->n, 4);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(weight->Code(i % 2 * 32, i / 2), i + 1) << i;
  EXPECT_EQ(weight->Code(1, 0), 15);
  EXPECT_EQ(ToString(weight->scheme), "w4cm7+1*t");
  EXPECT_EQ(WeightValue(*weight, 1, 0), 2.0f);  // (15 - 7) / 4
  linear.Set("scale_mode", Setting::String("multiply"));
  EXPECT_EQ(WeightValue(*linear.Decode(), 1, 0), 32.0f);
}

TEST(GemliteFormat, ThreeBitsAreTenToAWord) {
  Linear linear = MakeLinear();
  linear.Set("bits", 3);
  linear.Reshape("qweight", {32, 1});
  linear.Put<uint32_t>("qweight", 0, 0b001'010'011'100'101'110'111'001'010'011'00);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_EQ(weight->k, 10);
  ASSERT_EQ(weight->n, 32);
  // Code 32 i of the flat W_q is k = 32 i % 10 of row 32 i / 10.
  const int codes[] = {1, 2, 3, 4, 5, 6, 7, 1, 2, 3};
  for (int i = 0; i < 10; ++i) EXPECT_EQ(weight->Code(32 * i % 10, 32 * i / 10), codes[i]) << i;
}

TEST(GemliteFormat, ExportOfAnyShapeImportsAsTheSame) {
  std::mt19937 random(3);
  for (const int bits : kWidths) {
    for (const auto& [k, n] : {std::pair{256, 64}, {1024, 32}, {33, 5}, {1, 1}, {100, 24}}) {
      HostWeight weight = {.k = k, .n = n, .scheme = {.bits = bits, .scale_dtype = {}}};
      weight.scheme.zero_kind = ZeroKind::kConstant;
      weight.codes.assign(weight.row_bytes() * k, 0);
      for (int row = 0; row < k; ++row) {
        for (int col = 0; col < n; ++col) {
          const int bit = col * weight.code_bits();
          const int code = static_cast<int>(random()) & ((1 << bits) - 1);
          weight.codes[row * weight.row_bytes() + bit / 8] |= code << (bit % 8);
        }
      }
      const auto words = PackWarpedInt32(weight);
      ASSERT_TRUE(words.ok()) << words.status();
      Linear linear = {.format = &kGemliteFormat};
      linear.Set("bits", bits);
      linear.Set("in_features", k);
      linear.Set("out_features", n);
      linear.Add("qweight", "I32", {static_cast<int64_t>(words->size())});
      for (size_t i = 0; i < words->size(); ++i) linear.Put("qweight", i, (*words)[i]);
      const auto back = linear.Decode();
      ASSERT_TRUE(back.ok()) << back.status();
      EXPECT_EQ(back->codes, weight.codes) << bits << " bits, " << k << " x " << n;
      EXPECT_EQ(ToString(back->scheme), absl::StrCat("w", bits, "c+1"));
    }
  }
}

TEST(GemliteFormat, ExportRefusesWhatItCannotHold) {
  const HostWeight good = *MakeLinear().Decode();
  ASSERT_TRUE(PackWarpedInt32(good).ok());
  HostWeight weight = good;
  weight.scheme.bits = 5;
  weight.codes.assign(64 * 4, 0);
  EXPECT_THAT(std::string(PackWarpedInt32(weight).status().message()),
              ::testing::HasSubstr("code: got w5"));
  weight = good;
  for (int i = 0; i < 64; ++i) weight.order.push_back(63 - i);
  EXPECT_THAT(std::string(PackWarpedInt32(weight).status().message()),
              ::testing::HasSubstr("order: got one"));
}

// The zeros and scales of each case, printed as a scheme.
TEST(GemliteFormat, ZerosAndScalesOfEveryShape) {
  Linear linear = MakeLinear();
  linear.tensors.erase("zeros");
  EXPECT_EQ(Described(linear), "w4c+1*t");
  linear.tensors.erase("scales");
  EXPECT_EQ(Described(linear), "w4c+1");
  linear.Add("zeros", "F16", {4});
  EXPECT_EQ(Described(linear), "w4c+1") << "all of them are 0";
  linear.Put<uint16_t>("zeros", 1, 0x3c00);  // 1
  EXPECT_EQ(Described(linear), "w4cz+1");
  linear.Put<uint16_t>("zeros", 2, 0x3800);  // 0.5
  EXPECT_EQ(Described(linear), "w4cr:fp32+1");
  linear.Put<uint16_t>("zeros", 2, 0x4c00);  // 16, which is not a code
  EXPECT_EQ(Described(linear), "w4cr:fp32+1");
  linear.Add("zeros", "I8", {2, 4});
  linear.Put<int8_t>("zeros", 0, -1);
  EXPECT_EQ(Described(linear), "w4g32r:fp32+1");
  linear.Add("scales", "F32", {4});
  for (int i = 0; i < 4; ++i) linear.Put<float>("scales", i, 2.0f);
  EXPECT_EQ(Described(linear), "w4g32r:fp32+1*c");
  linear.Add("scales", "F16", {2, 4});
  for (int i = 0; i < 8; ++i) linear.Put<uint16_t>("scales", i, 0x3c00);
  EXPECT_EQ(Described(linear), "w4g32r:fp32+fp32");
  linear.Set("scale_mode", Setting::String("multiply"));
  EXPECT_EQ(Described(linear), "w4g32r:fp32");
  linear.Add("zeros", "F32", {1});
  linear.Put<float>("zeros", 0, 7.5f);
  EXPECT_EQ(Described(linear), "w4g32r:fp32") << "one real zero for all, by groups as the scales";
  EXPECT_EQ(linear.Decode()->RealZero(1, 3), 7.5f);
}

TEST(GemliteFormat, Refusals) {
  const Refusal refusals[] = {
      {"bits", With("bits", 5), {"bits: got 5", "1, 2, 3, 4 or 8"}},
      {"no bits", [](Linear* l) { l->settings.members.erase("bits"); }, {"bits: got nothing"}},
      {"mode", With("scale_mode", Setting::String("add")), {"scale_mode: got \"add\""}},
      {"no words", Without("qweight"), {"tensor \"qweight\": got nothing"}},
      {"type of words", WithDtype("qweight", "F32"), {"tensor \"qweight\": got dtype F32"}},
      {"missing bytes", Short("qweight"), {"tensor \"qweight\": got 127 bytes"}},
      {"K", With("in_features", 65), {"shape [4, 8]", "[64]"}},
      {"too few words for K", With("in_features", 72), {"shape [4, 8]", "[64]"}},
      {"too many words for K", With("in_features", 56), {"shape [4, 8]", "[32]"}},
      {"N", With("out_features", 5), {"tensor \"qweight\": got shape [4, 8]"}},
      {"flat without K", WithShape("qweight", {32}), {"in_features: got nothing"}},
      {"words that are no tile", WithShape("qweight", {3, 8}), {"[32]: rows do not fill"}},
      {"divisor", [](Linear* l) { l->Put<float>("scales", 0, 0.0f); }, {"\"scales\": got 0"}},
      {"NaN", [](Linear* l) { l->Put<float>("scales", 0, NAN); }, {"\"scales\": got NaN"}},
      {"type of scales", WithDtype("scales", "I32"), {"\"scales\": got dtype I32"}},
      {"shape of scales", WithShape("scales", {3}), {"\"scales\": got shape [3]", "[1], [4]"}},
      {"rank of zeros", WithShape("zeros", {1, 1, 4}), {"\"zeros\": got shape [1, 1, 4]"}},
      {"large zero", [](Linear* l) { l->Put<int32_t>("zeros", 0, 1 << 25); }, {"-2^24 to 2^24"}},
      {"two counts of groups",
       [](Linear* l) {
         l->Add("scales", "F16", {2, 4});
         l->Set("scale_mode", Setting::String("multiply"));
         l->Add("zeros", "U8", {4, 4});
         l->Put<uint8_t>("zeros", 0, 1);
       },
       {"\"zeros\": got 4 groups", "2, as the scales"}},
      {"group size",
       [](Linear* l) {
         l->Add("zeros", "U8", {2, 4});
         l->Put<uint8_t>("zeros", 0, 1);
         l->Set("group_size", 16);
       },
       {"\"zeros\": got 2 groups", "4 (K = 64"}},
      {"bias", [](Linear* l) { l->Add("bias", "F16", {3}); }, {"tensor \"bias\": got shape [3]"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeLinear(), refusal);
  }
}

}  // namespace
}  // namespace awqd
