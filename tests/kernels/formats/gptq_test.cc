// GPTQ's words, zero points and g_idx: pinned ones, every width both ways, and every refusal.
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/gptq/gptq_words.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

// 4 bits, K = 64 in groups of 16, N = 8. Codes 0, zero points 8 (stored as 7), scales 1.
Linear MakeLinear() {
  Linear out = {.format = &kGptqFormat};
  out.Set("bits", 4);
  out.Set("group_size", 16);
  out.Add("qweight", "I32", {8, 8});
  out.Add("qzeros", "I32", {4, 1});
  out.Add("scales", "F16", {4, 8});
  for (int i = 0; i < 4; ++i) out.Put<uint32_t>("qzeros", i, 0x77777777);
  for (int i = 0; i < 32; ++i) out.Put<uint16_t>("scales", i, 0x3c00);
  return out;
}

void AddGroups(Linear* linear, const std::vector<int32_t>& group_of) {
  linear->Add("g_idx", "I32", {static_cast<int64_t>(group_of.size())});
  for (size_t i = 0; i < group_of.size(); ++i) linear->Put("g_idx", i, group_of[i]);
}

// Groups 0 1 2 3 0 1 2 3 ...
std::vector<int32_t> InTurn(int k, int groups) {
  std::vector<int32_t> out(k);
  for (int i = 0; i < k; ++i) out[i] = i % groups;
  return out;
}

std::string Described(const Linear& linear) {
  const auto weight = linear.Decode();
  if (!weight.ok()) return std::string(weight.status().message());
  const absl::Status valid = Validate(*weight);
  return valid.ok() ? ToString(weight->scheme) : std::string(valid.message());
}

TEST(GptqFormat, PinnedWords) {
  Linear linear = MakeLinear();
  linear.Put<uint32_t>("qweight", 8 + 2, 0x87654321);  // rows 8 to 15 of column 2
  linear.Put<uint32_t>("qzeros", 1, 0x65432107);       // group 1: 8 1 2 3 4 5 6 7
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4g16z");
  EXPECT_TRUE(weight->order.empty());
  for (int i = 0; i < 8; ++i) EXPECT_EQ(weight->Code(8 + i, 2), i + 1);
  EXPECT_EQ(weight->Code(8, 3), 0);
  EXPECT_EQ(weight->Zero(0, 1), 8);
  for (int i = 1; i < 8; ++i) EXPECT_EQ(weight->Zero(1, i), i);
  linear.Set("checkpoint_format", Setting::String("gptq_v2"));
  EXPECT_EQ(linear.Decode()->Zero(0, 1), 7);
}

// Writers of symmetric files name the wrong version at times: every zero point is 8, or 7.
TEST(GptqFormat, SymmetricZeroPointsOfTheOtherVersion) {
  for (const std::string format : {"gptq", "gptq_v2"}) {
    for (const uint32_t stored : {0x77777777u, 0x88888888u}) {
      SCOPED_TRACE(format);
      Linear linear = MakeLinear();
      linear.Set("checkpoint_format", Setting::String(format));
      linear.Set("sym", Setting::Literal(true));
      for (int i = 0; i < 4; ++i) linear.Put<uint32_t>("qzeros", i, stored);
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      EXPECT_EQ(ToString(weight->scheme), "w4g16s");
      const std::string remark = kGptqFormat.remark(linear.settings, linear.Views());
      if ((format == "gptq") == (stored == 0x77777777u)) {
        EXPECT_EQ(remark, "");
      } else {
        EXPECT_THAT(remark, ::testing::AllOf(::testing::HasSubstr("every zero point is stored as"),
                                             ::testing::HasSubstr("read as 8")));
      }
      // Where sym says nothing they are as they stand.
      linear.Set("sym", Setting::Literal(false));
      EXPECT_EQ(linear.Decode()->Zero(0, 0),
                (stored == 0x77777777u ? 7 : 8) + (format == "gptq" ? 1 : 0));
      EXPECT_EQ(kGptqFormat.remark(linear.settings, linear.Views()), "");
    }
  }
  // One that differs is still refused.
  Linear linear = MakeLinear();
  linear.Set("sym", Setting::Literal(true));
  for (int i = 0; i < 4; ++i) linear.Put<uint32_t>("qzeros", i, 0x88888888);
  linear.Put<uint32_t>("qzeros", 3, 0x88878888);
  EXPECT_THAT(Described(linear), ::testing::HasSubstr("got zero point 9 at [0, 0], expected 8"));
}

// Zero points 0 1 2 ... 7 minus 1 each, subtracted from the word: 0x76543210 - 0x11111111.
TEST(GptqFormat, ZeroPointsOfZeroBorrowAcrossAWord) {
  Linear linear = MakeLinear();
  linear.Put<uint32_t>("qzeros", 0, 0x654320ff);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  for (int i = 0; i < 8; ++i) EXPECT_EQ(weight->Zero(0, i), i);
}

TEST(GptqFormat, ThreeBitsCrossWordsOrLieInPlanes) {
  Linear linear = MakeLinear();
  linear.Set("bits", 3);
  linear.Set("group_size", -1);
  linear.Reshape("qweight", {3, 32});
  linear.Reshape("scales", {1, 32});
  linear.Reshape("qzeros", {1, 3});
  linear.Put<uint32_t>("qweight", 0, 0xc0000000);   // code 10: the low two bits are in this word
  linear.Put<uint32_t>("qweight", 32, 0x00000001);  // and the third in the next
  linear.Put<uint32_t>("qzeros", 1, 0x80000000);    // code 21: its lowest bit
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->k, 32);
  EXPECT_EQ(weight->Code(10, 0), 7);
  EXPECT_EQ(weight->Zero(0, 21), 2);  // stored as 1
  EXPECT_EQ(weight->Zero(0, 0), 1);
  linear.Put<uint32_t>("qzeros", 0, 0x00000007);
  EXPECT_EQ(linear.Decode()->Zero(0, 0), 0) << "each field wraps by itself";
  EXPECT_EQ(linear.Decode()->Zero(0, 1), 1);
  linear.Set("checkpoint_format", Setting::String("gptq_p"));
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->Code(15, 0), 3) << "the low two bits of 16 codes fill the first word";
  EXPECT_EQ(weight->Code(16, 0), 1) << "and of the others the second";
  linear.Put<uint32_t>("qweight", 64, 1u << 31);
  EXPECT_EQ(linear.Decode()->Code(31, 0), 4) << "the third has the high bits";
}

// Words of random codes, packed a bit at a time, in every width, order and some shapes.
TEST(GptqWords, EveryWidthAndShape) {
  std::mt19937 random(5);
  for (const GptqWords order : {GptqWords::kDense, GptqWords::kPlanes}) {
    for (int bits = 2; bits <= 8; ++bits) {
      for (const auto& [k, n] : {std::pair{32, 32}, {96, 64}, {64, 1056}, {50, 7}, {1, 1}}) {
        if (order == GptqWords::kPlanes && k % 32 != 0) continue;
        std::vector<int32_t> place(k);
        std::iota(place.begin(), place.end(), 0);
        std::shuffle(place.begin(), place.end(), random);
        std::vector<uint32_t> words(WordsOfCodes(k, bits) * n), zeros(n * WordsOfCodes(k, bits));
        std::vector<int> codes(k * n);
        const auto plane_bit = [&](int code, int bit) {
          if (order == GptqWords::kDense || bits == 8) return code % 32 * bits + bit;
          const int low = bits == 3 ? 2 : bits & 4 ? 4 : 2;
          if (bit < low) return code % 32 * low + bit;
          if (bits == 6 || (bits == 7 && bit < 6)) return 128 + code % 32 * 2 + bit - 4;
          return 32 * (bits - 1) + code % 32;
        };
        for (int row = 0; row < k; ++row) {
          for (int col = 0; col < n; ++col) {
            codes[row * n + col] = static_cast<int>(random() % (1u << bits));
            for (int bit = 0; bit < bits; ++bit) {
              const int at = row / 32 * 32 * bits + plane_bit(row, bit);
              const uint32_t one = codes[row * n + col] >> bit & 1;
              words[at / 32 * n + col] |= one << (at % 32);
              zeros[col * WordsOfCodes(k, bits) + at / 32] |= one << (at % 32);
            }
          }
        }
        const auto bytes = [](const std::vector<uint32_t>& from) {
          return absl::MakeSpan(reinterpret_cast<const uint8_t*>(from.data()), 4 * from.size());
        };
        HostWeight weight = {.k = k, .n = n, .scheme = {.bits = bits}};
        weight.codes = UnpackGptqRows(bytes(words), k, n, bits, order, place);
        const std::vector<uint8_t> columns = UnpackGptqColumns(bytes(zeros), n, k, bits, order, 0);
        int wrong = 0;
        for (int row = 0; row < k; ++row) {
          for (int col = 0; col < n; ++col) {
            wrong += weight.Code(place[row], col) != codes[row * n + col];
            wrong += columns[col * k + row] != codes[row * n + col];
          }
        }
        EXPECT_EQ(wrong, 0) << bits << " bits, " << k << " x " << n;
        weight.scales.resize(2 * n);
        weight.zeros.resize(n);
        EXPECT_TRUE(Validate(weight).ok()) << Validate(weight);
      }
    }
  }
}

TEST(GptqFormat, RowsAreSortedByGroup) {
  Linear linear = MakeLinear();
  linear.Set("desc_act", Setting::Literal(true));
  AddGroups(&linear, InTurn(64, 4));
  for (int i = 0; i < 64; ++i) {  // code i % 16 in row i of column 0
    uint32_t word = 0;
    std::memcpy(&word, linear.tensors["qweight"].bytes.data() + 4 * (i / 8 * 8), 4);
    linear.Put<uint32_t>("qweight", i / 8 * 8, word | static_cast<uint32_t>(i % 16) << i % 8 * 4);
  }
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
  ASSERT_EQ(weight->order.size(), 64u);
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(weight->order[i], i % 16 * 4 + i / 16);
    EXPECT_EQ(weight->Code(i, 0), weight->order[i] % 16);
  }
}

TEST(GptqFormat, AShortLastGroupMayHaveAnyRows) {
  Linear linear = MakeLinear();
  linear.Set("group_size", 20);  // 20, 20, 20, 4
  EXPECT_EQ(Described(linear), "w4g20z");
  std::vector<int32_t> group_of(64);
  for (int i = 0; i < 64; ++i) group_of[i] = (63 - i) / 20;
  AddGroups(&linear, group_of);
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->order[60], 0);
  EXPECT_EQ(weight->order[0], 44);
}

TEST(GptqFormat, GroupsThatChangeNothingMakeNoOrder) {
  for (const bool act : {false, true}) {
    Linear linear = MakeLinear();
    linear.Set("desc_act", Setting::Literal(act));
    std::vector<int32_t> group_of(64);
    for (int i = 0; i < 64; ++i) group_of[i] = i / 16;
    AddGroups(&linear, group_of);
    EXPECT_TRUE(linear.Decode()->order.empty());
    linear.Set("group_size", act ? -1 : 16);
    if (act) {
      linear.Reshape("qzeros", {1, 1});
      linear.Reshape("scales", {1, 8});
    }
    AddGroups(&linear, std::vector<int32_t>(64));
    const auto zeros = linear.Decode();
    ASSERT_TRUE(zeros.ok()) << zeros.status();
    EXPECT_TRUE(zeros->order.empty());
    linear.tensors.erase("g_idx");
    EXPECT_TRUE(linear.Decode().ok());
  }
}

TEST(GptqFormat, SymmetricOnesHaveAConstantZero) {
  Linear linear = MakeLinear();
  linear.Set("sym", Setting::Literal(true));
  EXPECT_EQ(Described(linear), "w4g16s");
  linear.Set("group_size", 128);
  linear.Reshape("scales", {1, 8});
  linear.Reshape("qzeros", {1, 1});
  linear.Put<uint32_t>("qzeros", 0, 0x77777777);
  EXPECT_EQ(Described(linear), "w4cs") << "a group that is larger than K";
}

// g_idx determines how many of the last word's codes exist; without g_idx all do.
TEST(GptqFormat, InFeaturesThatFillNoWord) {
  Linear linear = MakeLinear();
  linear.settings.members.erase("group_size");
  EXPECT_EQ(linear.Decode()->k, 64);
  linear.Set("group_size", 16);
  std::vector<int32_t> group_of(61);
  for (int i = 0; i < 61; ++i) group_of[i] = i / 16;
  AddGroups(&linear, group_of);
  EXPECT_EQ(linear.Decode()->k, 61);
}

TEST(GptqFormat, Refusals) {
  const auto groups = [](std::vector<int32_t> group_of) {
    return [=](Linear* l) { AddGroups(l, group_of); };
  };
  std::vector<int32_t> uneven = InTurn(64, 4), negative = uneven, large = uneven;
  uneven[0] = 1;
  negative[5] = -1;
  large[5] = 4;
  const Setting yes = Setting::Literal(true), no = Setting::Literal(false);
  const Refusal refusals[] = {
      {"no bits", [](Linear* l) { l->settings.members.erase("bits"); }, {"bits: got nothing"}},
      {"bits", With("bits", 16), {"bits: got 16, expected 2, 3, 4 or 8"}},
      {"1 bit", With("bits", 1), {"bits: got 1"}},
      {"bit planes", With("bits", 5), {"bits: got 5", "checkpoint_format \"gptq_p\""}},
      {"format", With("checkpoint_format", Setting::String("marlin")), {"got \"marlin\"", "order"}},
      {"no words", Without("qweight"), {"tensor \"qweight\": got nothing"}},
      {"no zeros", Without("qzeros"), {"tensor \"qzeros\": got nothing"}},
      {"no scales", Without("scales"), {"tensor \"scales\": got nothing"}},
      {"type of words", WithDtype("qweight", "F32"), {"tensor \"qweight\": got dtype F32"}},
      {"type of scales", WithDtype("scales", "I32"), {"tensor \"scales\": got dtype I32"}},
      {"rank", WithShape("qweight", {1, 8, 8}), {"tensor \"qweight\": got shape [1, 8, 8]"}},
      {"no rows", WithShape("qweight", {0, 8}), {"\"qweight\": got shape [0, 8]", "at least 1"}},
      {"missing bytes", Short("qweight"), {"tensor \"qweight\": got 255 bytes"}},
      {"missing zeros", Short("qzeros"), {"tensor \"qzeros\": got 15 bytes"}},
      {"N", WithShape("qweight", {8, 9}), {"\"qweight\": got shape [8, 9]", "[8, 8] (N = 8"}},
      {"K", WithShape("qweight", {9, 8}), {"\"scales\": got 4 groups, expected 5 (K = 72"}},
      {"group size", With("group_size", 32), {"\"scales\": got 4 groups, expected 2 (K = 64"}},
      {"group of 0", With("group_size", 0), {"group_size: got 0"}},
      {"groups of zeros", WithShape("qzeros", {3, 1}), {"\"qzeros\": got shape [3, 1]", "[4, 1]"}},
      {"width of zeros", WithShape("qzeros", {4, 2}), {"\"qzeros\": got shape [4, 2]", "[4, 1]"}},
      {"other width", With("bits", 8), {"tensor \"scales\": got 4 groups, expected 2"}},
      {"words of 3 bits", With("bits", 3), {"\"qweight\": got 8 rows", "a multiple of 3"}},
      {"NaN", [](Linear* l) { l->Put<uint16_t>("scales", 5, 0x7e00); }, {"NaN at element 5"}},
      {"zero point",
       With("sym", yes),
       {"\"qzeros\": got zero point 1 at [2, 1], expected 8, stored as 7, as sym is true"}},
      {"groups needed", With("desc_act", yes), {"tensor \"g_idx\": got nothing", "desc_act"}},
      {"too few in-features", groups(InTurn(56, 4)), {"\"g_idx\": got shape [56]", "[64]"}},
      {"too many in-features", groups(InTurn(65, 4)), {"\"g_idx\": got shape [65]", "[64]"}},
      {"negative group", groups(negative), {"\"g_idx\": got -1 at index 5, expected 0 to 3"}},
      {"group out of range", groups(large), {"\"g_idx\": got 4 at index 5, expected 0 to 3"}},
      {"uneven groups", groups(uneven), {"\"g_idx\": got 15 in-features of group 0, expected 16"}},
      {"type of groups",
       [](Linear* l) { l->Add("g_idx", "F32", {64}); },
       {"tensor \"g_idx\": got dtype F32"}},
      {"order that is none",
       [&](Linear* l) {
         AddGroups(l, InTurn(64, 4));
         l->Set("desc_act", no);
       },
       {"\"g_idx\": got 1 at index 1, expected 0, index / group_size, as desc_act is false"}},
      {"zeros for an order",
       [&](Linear* l) {
         AddGroups(l, std::vector<int32_t>(64));
         l->Set("desc_act", yes);
       },
       {"\"g_idx\": got 64 in-features of group 0, expected 16"}},
      {"planes of odd N",
       [](Linear* l) {
         l->Set("bits", 5);
         l->Set("checkpoint_format", Setting::String("gptq_p"));
         l->Reshape("qweight", {10, 8});
       },
       {"\"qweight\": got K = 64, N = 8, expected multiples of 32"}},
      {"bias", [](Linear* l) { l->Add("bias", "F16", {3}); }, {"tensor \"bias\": got shape [3]"}},
  };
  Linear linear = MakeLinear();
  linear.Put<uint32_t>("qzeros", 2, 0x77777707);
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(linear, refusal);
  }
}

}  // namespace
}  // namespace awqd
