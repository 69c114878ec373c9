// AutoAWQ "gemm": the order of nibbles, and every refusal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/half.h"
#include "kernels/formats/format.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::array<int, 8> kPackOrder = {0, 2, 4, 6, 1, 3, 5, 7};

Linear MakeLinear(int64_t k, int64_t n, int64_t group_size) {
  Linear out = {.format = &kAwqFormat};
  out.Set("group_size", group_size);
  out.Add("qweight", "I32", {k, n / 8});
  out.Add("qzeros", "I32", {k / group_size, n / 8});
  out.Add("scales", "F16", {k / group_size, n});
  return out;
}

void Randomise(Linear* linear, uint32_t seed) {
  std::mt19937 random(seed);
  for (auto& [name, tensor] : linear->tensors) {
    for (uint8_t& byte : tensor.bytes) byte = static_cast<uint8_t>(random());
    if (name != "scales") continue;
    for (size_t i = 1; i < tensor.bytes.size(); i += 2) tensor.bytes[i] &= 0xbb;  // no NaN
  }
}

uint32_t WordAt(const std::vector<uint8_t>& bytes, int64_t index) {
  uint32_t word;
  std::memcpy(&word, bytes.data() + 4 * index, sizeof(word));
  return word;
}

// The definition: column 8c + kPackOrder[i] of a row is nibble i of word c.
int NibbleOf(const Linear::Tensor& tensor, int64_t row, int64_t column) {
  int nibble = 0;
  while (kPackOrder[nibble] != column % 8) ++nibble;
  return WordAt(tensor.bytes, row * tensor.shape[1] + column / 8) >> (4 * nibble) & 15;
}

TEST(AwqFormat, PinnedWordDecodesToZeroToSeven) {
  Linear linear = MakeLinear(1, 8, 1);
  const uint32_t word = 0x75316420;
  std::memcpy(linear.tensors["qweight"].bytes.data(), &word, 4);
  std::memcpy(linear.tensors["qzeros"].bytes.data(), &word, 4);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  for (int column = 0; column < 8; ++column) {
    EXPECT_EQ(weight->Code(0, column), column);
    EXPECT_EQ(weight->Zero(0, column), column);
  }
}

TEST(AwqFormat, EveryNibbleValueInEveryPosition) {
  for (int nibble = 0; nibble < 8; ++nibble) {
    for (uint32_t value = 0; value < 16; ++value) {
      Linear linear = MakeLinear(1, 8, 1);
      const uint32_t word = value << (4 * nibble);
      std::memcpy(linear.tensors["qweight"].bytes.data(), &word, 4);
      std::memcpy(linear.tensors["qzeros"].bytes.data(), &word, 4);
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      for (int column = 0; column < 8; ++column) {
        const int expected = column == kPackOrder[nibble] ? static_cast<int>(value) : 0;
        EXPECT_EQ(weight->Code(0, column), expected);
        EXPECT_EQ(weight->Zero(0, column), expected);
      }
    }
  }
}

TEST(AwqFormat, ShapesAndGroups) {
  struct Shape {
    int64_t k, n, group;
  };
  for (const Shape& s :
       {Shape{32, 8, 16}, Shape{64, 64, 32}, Shape{96, 72, 96}, Shape{128, 128, 128},
        Shape{10944, 8, 64}, Shape{33, 192, 11}, Shape{7, 8, 1}}) {
    Linear linear = MakeLinear(s.k, s.n, s.group);
    Randomise(&linear, 7);
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    EXPECT_EQ(weight->format, "awq");
    EXPECT_EQ(weight->scheme, Asymmetric(4, s.group == weight->k ? 0 : s.group));
    EXPECT_EQ(weight->scales, linear.tensors["scales"].bytes);
    int64_t wrong = 0;
    for (int64_t row = 0; row < s.k; ++row) {
      for (int64_t column = 0; column < s.n; ++column) {
        wrong += weight->Code(row, column) != NibbleOf(linear.tensors["qweight"], row, column);
      }
    }
    for (int64_t group = 0; group < s.k / s.group; ++group) {
      for (int64_t column = 0; column < s.n; ++column) {
        wrong += weight->Zero(group, column) != NibbleOf(linear.tensors["qzeros"], group, column);
      }
    }
    EXPECT_EQ(wrong, 0) << s.k << " x " << s.n << " g " << s.group;
  }
}

TEST(AwqFormat, UnalignedBytes) {
  Linear linear = MakeLinear(32, 16, 32);
  Randomise(&linear, 3);
  const auto expected = linear.Decode();
  LinearTensors views;
  std::vector<std::vector<uint8_t>> shifted;
  for (const auto& [name, tensor] : linear.tensors) {
    shifted.push_back({0xff});
    shifted.back().insert(shifted.back().end(), tensor.bytes.begin(), tensor.bytes.end());
    views.emplace(name, TensorView{tensor.dtype, tensor.shape,
                                   absl::MakeConstSpan(shifted.back()).subspan(1)});
  }
  const auto weight = kAwqFormat.Decode(linear.settings, views);
  ASSERT_TRUE(weight.ok() && expected.ok());
  EXPECT_EQ(weight->codes, expected->codes);
  EXPECT_EQ(weight->zeros, expected->zeros);
  EXPECT_EQ(weight->scales, expected->scales);
}

TEST(AwqFormat, GroupSizeMinusOneIsAllOfK) {
  Linear linear = MakeLinear(96, 8, 96);
  linear.Set("group_size", -1);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->scheme, Asymmetric(4, 0));
}

TEST(AwqFormat, UnsaidGroupSizeFollowsFromScales) {
  Linear linear = MakeLinear(96, 8, 32);
  linear.settings.members.erase("group_size");
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->scheme, Asymmetric(4, 32));
}

TEST(AwqFormat, SettingsUnderEveryName) {
  Linear linear = MakeLinear(96, 8, 32);
  linear.settings.members = {{"w_bit", Setting::Typed("4")},
                             {"q_group_size", Setting::Typed("32")},
                             {"format", Setting::Typed("GEMM")},
                             {"zero_point", Setting::Typed("true")}};
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->scheme, Asymmetric(4, 32));
}

TEST(AwqFormat, ScalesOfBf16) {
  Linear linear = MakeLinear(64, 8, 32);
  linear.tensors["scales"].dtype = "BF16";
  const uint16_t bits = FloatToBf16(0.3f);
  std::memcpy(linear.tensors["scales"].bytes.data(), &bits, 2);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4g32z+bf16");
  EXPECT_EQ(weight->Scale(0, 0), Bf16ToFloat(bits));
}

TEST(AwqFormat, BiasOfEachFloatingType) {
  const std::vector<float> values = {0.0f, 1.5f, -2.25f, 65504.0f, -0.0f, 0.125f, 3.0f, -1.0f};
  for (const std::string dtype : {"F16", "BF16", "F32"}) {
    Linear linear = MakeLinear(32, 8, 32);
    linear.tensors["bias"].dtype = dtype;
    linear.Reshape("bias", {8});
    std::vector<float> expected;
    for (int i = 0; i < 8; ++i) {
      uint8_t* at = linear.tensors["bias"].bytes.data() + i * (dtype == "F32" ? 4 : 2);
      const uint16_t half = dtype == "F16" ? FloatToHalf(values[i]) : FloatToBf16(values[i]);
      std::memcpy(at, dtype == "F32" ? static_cast<const void*>(&values[i]) : &half,
                  dtype == "F32" ? 4 : 2);
      expected.push_back(dtype == "BF16" ? Bf16ToFloat(half) : values[i]);
    }
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(weight->bias, expected) << dtype;
  }
}

TEST(AwqFormat, OddScalesPassUnchanged) {
  Linear linear = MakeLinear(32, 8, 32);
  const uint16_t bits[8] = {0x3c00, 0x7c00, 0xfc00, 0x0001, 0x8001, 0x0000, 0x8000, 0x7bff};
  std::memcpy(linear.tensors["scales"].bytes.data(), bits, sizeof(bits));
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(std::memcmp(weight->scales.data(), bits, sizeof(bits)), 0);
}

class AwqRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(AwqRefusal, NamesTensorFoundAndExpected) {
  ExpectRefused(MakeLinear(64, 16, 32), GetParam());
}

std::vector<Refusal> Refusals() {
  return {
      {"QweightMissing",
       Without("qweight"),
       {"\"qweight\": got nothing, expected I32 [K, N*bits/32]"}},
      {"ScalesMissing",
       Without("scales"),
       {"\"scales\": got nothing, expected F16 or BF16 [K/group_size, N]"}},
      {"QzerosMissing", Without("qzeros"), {"\"qzeros\": got nothing, expected I32"}},
      {"ZeroPointsThoughThereAreNone",
       With("zero_point", Setting::Literal(false)),
       {"\"qzeros\": got zero point 0 at [0, 0], expected 8, as zero_point is false"}},
      {"QweightDtype", WithDtype("qweight", "U32"), {"\"qweight\": got dtype U32, expected I32"}},
      {"QzerosDtype", WithDtype("qzeros", "F16"), {"\"qzeros\": got dtype F16, expected I32"}},
      {"ScalesDtype",
       WithDtype("scales", "F32"),
       {"\"scales\": got dtype F32, expected F16 or BF16"}},
      {"QweightRank",
       WithShape("qweight", {128}),
       {"\"qweight\": got shape [128], expected rank 2"}},
      {"ScalesRank",
       WithShape("scales", {1, 2, 16}),
       {"\"scales\": got shape [1, 2, 16], expected rank 2"}},
      {"QzerosRank", WithShape("qzeros", {}), {"\"qzeros\": got shape [], expected rank 2"}},
      {"QweightNoRows",
       WithShape("qweight", {0, 2}),
       {"\"qweight\": got shape [0, 2]", "at least 1"}},
      {"ScalesNegative",
       [](Linear* l) {
         l->tensors["scales"].shape = {-2, 16};
       },
       {"\"scales\": got shape [-2, 16]", "at least 1"}},
      {"QweightOverflow",
       [](Linear* l) {
         l->tensors["qweight"].shape = {int64_t{1} << 32, int64_t{1} << 32};
       },
       {"\"qweight\": got shape [4294967296, 4294967296]", "2^63"}},
      {"QweightOneByteShort",
       Short("qweight"),
       {"\"qweight\": got 511 bytes, expected 512 for I32 [64, 2]"}},
      {"ScalesOneByteLong",
       [](Linear* l) { l->tensors["scales"].bytes.push_back(0); },
       {"\"scales\": got 65 bytes, expected 64"}},
      {"NNotMultipleOfEight",
       WithShape("scales", {2, 12}),
       {"\"scales\": got N = 12", "multiple of 8"}},
      {"ScalesColumns",
       WithShape("scales", {2, 24}),
       {"\"qweight\": got shape [64, 2], expected [64, 3]", "N = 24 of tensor \"scales\""}},
      {"ScalesRows",
       WithShape("scales", {3, 16}),
       {"\"scales\": got 3 groups, expected 2 (K = 64 in groups of 32)"}},
      {"QzerosRows",
       WithShape("qzeros", {1, 2}),
       {"\"qzeros\": got shape [1, 2], expected [2, 2]"}},
      {"QzerosColumns",
       WithShape("qzeros", {2, 3}),
       {"\"qzeros\": got shape [2, 3], expected [2, 2]"}},
      {"GroupDoesNotDivide", With("group_size", 48), {"group_size: got 48", "a divisor of K = 64"}},
      {"GroupPastK", With("group_size", 128), {"group_size: got 128", "a divisor of K = 64"}},
      {"GroupBelowMinusOne", With("group_size", -2), {"group_size: got -2", "at least -1"}},
      {"GroupOfAllKDisagrees", With("group_size", -1), {"\"scales\": got 2 groups, expected 1"}},
      {"UnsaidGroupRagged",
       [](Linear* l) {
         l->settings.members.erase("group_size");
         l->Reshape("scales", {3, 16});
       },
       {"\"scales\": got 3 groups, expected a divisor of K = 64"}},
      {"UnsaidGroupMoreRowsThanK",
       [](Linear* l) {
         l->settings.members.erase("group_size");
         l->Reshape("scales", {128, 16});
       },
       {"\"scales\": got 128 groups, expected a divisor of K = 64"}},
      {"BiasDtype",
       [](Linear* l) {
         l->Reshape("bias", {16});
         l->tensors["bias"].dtype = "I32";
       },
       {"\"bias\": got dtype I32, expected F16, BF16 or F32"}},
      {"BiasRank",
       [](Linear* l) {
         l->tensors["bias"].dtype = "F16";
         l->Reshape("bias", {1, 16});
       },
       {"\"bias\": got shape [1, 16], expected rank 1"}},
      {"BiasLength",
       [](Linear* l) {
         l->tensors["bias"].dtype = "F32";
         l->Reshape("bias", {8});
       },
       {"\"bias\": got shape [8], expected [16]"}},
      {"GroupOfNothing",
       With("group_size", 0),
       {"group_size: got 0, expected -1 (all of K) or at least 1"}},
      {"GroupIsNoNumber",
       With("group_size", Setting::String("32")),
       {"group_size: got \"32\", expected a whole"}},
      {"ScaleIsNan",
       [](Linear* l) { l->Put<uint16_t>("scales", 17, 0x7e00); },
       {"\"scales\": got NaN at element 17, expected numbers"}},
      {"OtherBits",
       With("bits", 8),
       {"\"qweight\": got shape [64, 2], expected [64, 4]", "codes of 8 bits"}},
      {"OneBit", With("bits", 1), {"bits: got 1, expected 2 to 8"}},
      {"NineBits", With("bits", 9), {"bits: got 9, expected 2 to 8"}},
      {"Gemv",
       With("version", Setting::String("gemv")),
       {"version: got \"gemv\", expected \"gemm\""}},
      {"UnknownVersion",
       With("checkpoint_format", Setting::String("gemm2")),
       {"version: got \"gemm2\", expected \"gemm\""}},
  };
}

INSTANTIATE_TEST_SUITE_P(All, AwqRefusal, ::testing::ValuesIn(Refusals()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace awqd
