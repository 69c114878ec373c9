// compressed-tensors "pack-quantized": pinned words, both packings in every width, zero points,
// weight_g_idx, and every refusal.
#include <random>
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/compressed_tensors/packed_words.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

void PutShape(Linear* linear, int64_t n, int64_t k) {
  linear->Add("weight_shape", "I64", {2});
  linear->Put<int64_t>("weight_shape", 0, n);
  linear->Put<int64_t>("weight_shape", 1, k);
}

// 4 bits, N = 8, K = 64 in groups of 16. Codes -8, scales 1.
Linear MakeLinear() {
  Linear out = {.format = &kPackQuantizedFormat};
  out.Set("num_bits", 4);
  out.Set("group_size", 16);
  out.Set("strategy", Setting::Typed("group"));
  out.Add("weight_packed", "I32", {8, 8});
  out.Add("weight_scale", "F16", {8, 4});
  for (int i = 0; i < 32; ++i) out.Put<uint16_t>("weight_scale", i, 0x3c00);
  PutShape(&out, 8, 64);
  return out;
}

// The same with zero points of 0, stored as 8.
Linear MakeAsymmetric() {
  Linear out = MakeLinear();
  out.Set("symmetric", Setting::Typed("false"));
  out.Add("weight_zero_point", "I32", {1, 4});
  for (int i = 0; i < 4; ++i) out.Put<uint32_t>("weight_zero_point", i, 0x88888888);
  return out;
}

void AddGroups(Linear* linear, const std::vector<int32_t>& group_of) {
  linear->Add("weight_g_idx", "I32", {static_cast<int64_t>(group_of.size())});
  for (size_t i = 0; i < group_of.size(); ++i) linear->Put("weight_g_idx", i, group_of[i]);
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

TEST(PackQuantizedFormat, PinnedWords) {
  Linear linear = MakeAsymmetric();
  linear.Put<uint32_t>("weight_packed", 2 * 8 + 1, 0x87654321);  // n = 2, k = 8 to 15
  linear.Put<uint32_t>("weight_zero_point", 3, 0x76543210);      // group 3: -8 for n = 0, ...
  linear.Put<uint16_t>("weight_scale", 2 * 4 + 0, 0x4000);       // n = 2, group 0: 2
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w4g16z");
  EXPECT_EQ(weight->n, 8);
  EXPECT_EQ(weight->k, 64);
  EXPECT_TRUE(weight->order.empty());
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(weight->Code(8 + i, 2), i + 1);
    EXPECT_EQ(weight->Zero(3, i), i);
    EXPECT_EQ(weight->Zero(2, i), 8);
  }
  EXPECT_EQ(WeightValue(*weight, 8, 2), -14.0f);  // (1 - 8) * 2
}

TEST(PackQuantizedFormat, ThreeBitsWithAndWithoutGaps) {
  Linear linear = MakeLinear();
  linear.Set("num_bits", 3);
  linear.Reshape("weight_packed", {8, 7});  // ten codes a word
  linear.Put<uint32_t>("weight_packed", 0, 7u << 27);
  linear.Put<uint32_t>("weight_packed", 1, 5);
  auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(ToString(weight->scheme), "w3g16s");
  EXPECT_EQ(weight->Code(9, 0), 7);
  EXPECT_EQ(weight->Code(10, 0), 5);
  linear.Reshape("weight_packed", {8, 6});
  linear.Put<uint32_t>("weight_packed", 0, 3u << 30);  // code 10: the low two bits
  linear.Put<uint32_t>("weight_packed", 1, 1);         // and the third
  weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->Code(10, 0), 7);
  EXPECT_EQ(weight->Code(11, 0), 0);
}

// If both packings have the same number of words, zero points or a setting decide.
TEST(PackQuantizedFormat, WordsThatLookAlike) {
  Linear linear = MakeLinear();
  linear.Set("num_bits", 5);
  linear.Set("strategy", Setting::Typed("channel"));
  linear.Set("group_size", -1);
  linear.Reshape("weight_scale", {8, 1});
  PutShape(&linear, 8, 12);
  linear.Reshape("weight_packed", {8, 2});        // six codes a word, or 60 bits
  linear.Put<uint32_t>("weight_packed", 1, 0x3);  // code 6, or the high bits of it
  EXPECT_EQ(Described(linear),
            "packing: got nothing, expected \"dense\" or \"padded\": 2 words of K = 12 codes of 5 "
            "bits may be either");
  linear.Set("packing", Setting::Typed("padded"));
  EXPECT_EQ(linear.Decode()->Code(6, 0), 3);
  linear.Set("packing", Setting::Typed("dense"));
  EXPECT_EQ(linear.Decode()->Code(6, 0), 12);
  linear.settings.members.erase("packing");
  PutShape(&linear, 64, 12);
  linear.Reshape("weight_packed", {64, 2});
  linear.Put<uint32_t>("weight_packed", 1, 0x3);
  linear.Reshape("weight_scale", {64, 1});
  linear.Add("weight_zero_point", "I32", {11, 1});
  EXPECT_EQ(linear.Decode()->Code(6, 0), 3);
  linear.Reshape("weight_zero_point", {10, 1});
  EXPECT_EQ(linear.Decode()->Code(6, 0), 12);
}

// Random codes, packed a bit at a time, in every width, both ways and some shapes.
TEST(PackedWords, EveryWidthAndShape) {
  std::mt19937 random(7);
  for (const bool padded : {false, true}) {
    for (int bits = 1; bits <= 8; ++bits) {
      // No K is a multiple of 3, the step of the order below.
      for (const auto& [n, k] : {std::pair{32, 64}, {5, 71}, {65, 130}, {1, 1}}) {
        const PackedWords packed = {bits, padded};
        const int64_t width = packed.Words(k), height = packed.Words(n);
        std::vector<uint32_t> rows(n * width), columns(height * k);
        std::vector<int> codes(n * k);
        const auto put = [&](std::vector<uint32_t>* words, int64_t stride, int64_t first, int index,
                             int code) {
          for (int bit = 0; bit < bits; ++bit) {
            const int64_t at = padded ? index / (32 / bits) * 32 + index % (32 / bits) * bits + bit
                                      : int64_t{index} * bits + bit;
            (*words)[first + at / 32 * stride] |= static_cast<uint32_t>(code >> bit & 1)
                                                  << (at % 32);
          }
        };
        for (int row = 0; row < n; ++row) {
          for (int col = 0; col < k; ++col) {
            const int code = static_cast<int>(random() % (1u << bits));
            codes[row * k + col] = code;
            put(&rows, 1, row * width, col, code);
            put(&columns, k, col, row, code);
          }
        }
        const auto bytes = [](const std::vector<uint32_t>& from) {
          return absl::MakeSpan(reinterpret_cast<const uint8_t*>(from.data()), 4 * from.size());
        };
        EXPECT_EQ(RowWithMoreCodes(bytes(rows), n, k, packed), -1);
        std::vector<int32_t> order(k);
        for (int i = 0; i < k; ++i) order[i] = (i * 3 + 1) % k;
        HostWeight weight = {.k = k, .n = n, .scheme = {.bits = bits}};
        weight.codes = UnpackRowsOfWords(bytes(rows), n, k, packed, {});
        HostWeight sorted = weight;
        sorted.codes = UnpackRowsOfWords(bytes(rows), n, k, packed, order);
        const std::vector<uint8_t> zeros = UnpackColumnsOfWords(bytes(columns), n, k, packed);
        int wrong = 0;
        for (int row = 0; row < n; ++row) {
          for (int col = 0; col < k; ++col) {
            wrong += weight.Code(col, row) != codes[row * k + col];
            wrong += sorted.Code(col, row) != codes[row * k + order[col]];
            wrong += zeros[col * n + row] != codes[row * k + col];
          }
        }
        EXPECT_EQ(wrong, 0) << bits << " bits, " << n << " x " << k << (padded ? " padded" : "");
      }
    }
  }
}

TEST(PackQuantizedFormat, ScalesOfEachStrategy) {
  Linear linear = MakeLinear();
  EXPECT_EQ(Described(linear), "w4g16s");
  linear.Set("group_size", 20);  // 20, 20, 20, 4
  EXPECT_EQ(Described(linear), "w4g20s");
  linear.Set("strategy", Setting::Typed("channel"));
  linear.settings.members.erase("group_size");
  linear.Add("weight_scale", "BF16", {8, 1});
  EXPECT_EQ(Described(linear), "w4cs+bf16");
  linear.settings.members.erase("strategy");
  EXPECT_EQ(Described(linear), "w4cs+bf16");
  linear.Add("weight_scale", "F32", {1});
  EXPECT_EQ(Described(linear), "w4ts+fp32");
  linear.Add("weight_zero_point", "I8", {1});
  linear.Put<int8_t>("weight_zero_point", 0, -3);
  EXPECT_EQ(Described(linear), "w4tz+fp32");
  EXPECT_EQ(linear.Decode()->Zero(0, 7), 5);
  linear.Set("strategy", Setting::Typed("tensor"));
  EXPECT_EQ(Described(linear), "w4tz+fp32");
}

TEST(PackQuantizedFormat, ZeroPointsOfAByte) {
  Linear linear = MakeAsymmetric();
  linear.Add("weight_zero_point", "I8", {8, 4});
  linear.Put<int8_t>("weight_zero_point", 5 * 4 + 2, 7);  // n = 5, group 2
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->Zero(2, 5), 15);
  EXPECT_EQ(weight->Zero(2, 4), 8);
}

TEST(PackQuantizedFormat, SymmetricOnesMayHaveZeroPointsOfZero) {
  Linear linear = MakeAsymmetric();
  linear.Set("symmetric", Setting::Typed("true"));
  EXPECT_EQ(Described(linear), "w4g16s");
  linear.settings.members.erase("symmetric");
  EXPECT_EQ(Described(linear), "w4g16z");
  linear.tensors.erase("weight_zero_point");
  EXPECT_EQ(Described(linear), "w4g16s");
}

TEST(PackQuantizedFormat, RowsAreSortedByGroup) {
  Linear linear = MakeLinear();
  for (int k = 0; k < 64; ++k) {  // code k % 16 of n = 1
    linear.tensors["weight_packed"].bytes[(64 + k) / 2] |=
        static_cast<uint8_t>(k % 16 << k % 2 * 4);
  }
  AddGroups(&linear, InTurn(64, 4));
  for (const char* actorder : {"", "group"}) {
    if (*actorder != 0) linear.Set("actorder", Setting::Typed(actorder));
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    ASSERT_EQ(weight->order.size(), 64u);
    for (int i = 0; i < 64; ++i) {
      EXPECT_EQ(weight->order[i], i % 16 * 4 + i / 16);
      EXPECT_EQ(weight->Code(i, 1), weight->order[i] % 16);
    }
  }
}

TEST(PackQuantizedFormat, GroupsThatChangeNothingMakeNoOrder) {
  std::vector<int32_t> in_order(64), none(64, -1);
  for (int i = 0; i < 64; ++i) in_order[i] = i / 16;
  for (const char* actorder : {"group", "weight"}) {
    for (const auto& group_of : {in_order, none}) {
      Linear linear = MakeLinear();
      linear.Set("actorder", Setting::Typed(actorder));
      AddGroups(&linear, group_of);
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      EXPECT_TRUE(weight->order.empty());
    }
  }
}

TEST(PackQuantizedFormat, ShapesOfExpertsAndOfRequests) {
  Linear linear = MakeLinear();
  linear.Add("weight_shape", "I32", {2});
  linear.Put<int32_t>("weight_shape", 0, 8);
  linear.Put<int32_t>("weight_shape", 1, 64);
  EXPECT_EQ(linear.Decode()->k, 64);
  linear.Add("weight_shape", "I64", {3});
  linear.Put<int64_t>("weight_shape", 0, 5);
  linear.Put<int64_t>("weight_shape", 1, 8);
  linear.Put<int64_t>("weight_shape", 2, 61);
  EXPECT_EQ(linear.Decode()->k, 61) << "words with padding";
}

TEST(PackQuantizedFormat, DeclaredActivations) {
  Linear linear = MakeLinear();
  linear.Set("activations", Setting::Typed("dynamic"));
  EXPECT_EQ(linear.Decode()->activations.how, ActivationQuantization::kPerToken);
  linear.Set("activations", Setting::Typed("static"));
  linear.Add("input_scale", "F32", {1});
  linear.Put<float>("input_scale", 0, 0.5f);
  EXPECT_EQ(linear.Decode()->activations.scale, 0.5f);
}

}  // namespace
}  // namespace awqd
