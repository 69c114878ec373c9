// "gguf": the places of codes and scales in each block type, and every refusal.
#include <cmath>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "kernels/base/half.h"
#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "kernels/formats/gguf/gguf_blocks.h"
#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

using Tensor = Linear::Tensor;

// Zeros: N = 3, K two blocks.
Linear MakeLinear(const GgufBlock& block) {
  Linear out = {.format = &kGgufFormat};
  out.tensors["weight"] = {
      std::string(block.name), {3, 2 * block.codes}, std::vector<uint8_t>(6 * block.bytes)};
  return out;
}

const GgufBlock& Named(absl::string_view name) {
  for (const GgufBlock& block : GgufBlocks()) {
    if (block.name == name) return block;
  }
  ADD_FAILURE() << name;
  return GgufBlocks().front();
}

Linear MakeQ4K() { return MakeLinear(Named("Q4_K")); }

TEST(GgufFormat, EveryTypeThatMarksALinearHasABlock) {
  ASSERT_EQ(GgufBlocks().size(), kGgufFormat.code_dtypes.size());
  for (const GgufBlock& block : GgufBlocks()) {
    SCOPED_TRACE(std::string(block.name));
    EXPECT_THAT(kGgufFormat.code_dtypes, ::testing::Contains(block.name));
    EXPECT_EQ(block.codes % kGgufRun, 0);
    const auto weight = MakeLinear(block).Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_TRUE(Validate(*weight).ok()) << Validate(*weight);
    EXPECT_EQ(weight->k, 2 * block.codes);
    EXPECT_EQ(weight->n, 3);
    EXPECT_EQ(weight->groups(), 2 * block.codes / block.group);
  }
}

// llama.cpp multiplies each product by "PATH.scale" where a file has it.
TEST(GgufFormat, AScaleMultipliesTheWholeWeight) {
  for (const GgufBlock& block : GgufBlocks()) {
    SCOPED_TRACE(std::string(block.name));
    Linear linear = MakeLinear(block);
    std::vector<uint8_t>& bytes = linear.tensors["weight"].bytes;
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 37 % 61);
    const auto plain = linear.Decode();
    ASSERT_TRUE(plain.ok()) << plain.status();
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, std::vector<int64_t>{1}}) {
      linear.Add("scale", "F32", shape);
      linear.Put<float>("scale", 0, 0.5f);
      linear.Add("input_scale", "F32", {1});
      const auto scaled = linear.Decode();
      ASSERT_TRUE(scaled.ok()) << scaled.status();
      ASSERT_TRUE(Validate(*scaled).ok()) << Validate(*scaled);
      EXPECT_EQ(ToString(scaled->scheme), ToString(plain->scheme) + "*t");
      for (int64_t k = 0; k < plain->k; ++k) {
        for (int64_t n = 0; n < plain->n; ++n) {
          ASSERT_EQ(WeightValue(*scaled, k, n), 0.5f * WeightValue(*plain, k, n));
        }
      }
    }
  }
  ExpectRefused(
      MakeQ4K(),
      {"shape", [](Linear* l) { l->Add("scale", "F32", {3}); }, {"\"scale\": got shape [3]"}});
  ExpectRefused(
      MakeQ4K(),
      {"dtype", [](Linear* l) { l->Add("scale", "I32", {1}); }, {"\"scale\": got dtype I32"}});
}

// Every bit of a block's codes belongs to one code: each bit changes one code by a power of two,
// and all bits together set all codes to their greatest.
TEST(GgufFormat, EveryBitOfABlockIsOfOneCodeOrOneCell) {
  for (const GgufBlock& block : GgufBlocks()) {
    SCOPED_TRACE(std::string(block.name));
    // Their codes are no bits.
    if (block.name == "TQ1_0" || block.code == CodeKind::kVector) continue;
    int64_t of_codes = 0;
    for (int64_t bit = 0; bit < 8 * block.bytes; ++bit) {
      std::vector<uint8_t> bytes(block.bytes), zero(block.codes), codes(block.codes);
      for (int run = 0; run < block.codes / kGgufRun; ++run) {
        block.run(bytes.data(), run, zero.data() + run * kGgufRun);
      }
      bytes[bit / 8] = static_cast<uint8_t>(1 << (bit % 8));
      int moved = 0;
      for (int run = 0; run < block.codes / kGgufRun; ++run) {
        block.run(bytes.data(), run, codes.data() + run * kGgufRun);
      }
      for (int64_t i = 0; i < block.codes; ++i) {
        if (codes[i] == zero[i]) continue;
        ++moved;
        const int step = std::abs(codes[i] - zero[i]);
        EXPECT_EQ(step & (step - 1), 0) << "bit " << bit;
        EXPECT_LT(codes[i], 1 << block.bits);
      }
      EXPECT_LE(moved, 1) << "bit " << bit;
      of_codes += moved;
    }
    // The sign bit of an E2M1 zero has no effect.
    EXPECT_EQ(of_codes, block.codes * (block.code == CodeKind::kE2m1 ? 3 : block.bits));
  }
}

// Each byte of codes has five of them, the last four bytes four.
TEST(GgufFormat, DigitsOfTernaryCodes) {
  const GgufBlock& block = Named("TQ1_0");
  const auto codes_of = [&](const std::vector<uint8_t>& bytes) {
    std::vector<uint8_t> codes(block.codes);
    for (int run = 0; run < 8; ++run) block.run(bytes.data(), run, codes.data() + run * kGgufRun);
    return codes;
  };
  std::vector<int> seen(block.codes);
  for (int64_t byte = 0; byte < block.bytes; ++byte) {
    std::vector<uint8_t> bytes(block.bytes);
    bytes[byte] = 0xff;
    const std::vector<uint8_t> codes = codes_of(bytes);
    EXPECT_EQ(absl::c_count(codes, 2), byte < 48 ? 5 : byte < 52 ? 4 : 0) << byte;
    EXPECT_EQ(absl::c_count(codes, 1), 0) << byte;
    for (int64_t i = 0; i < block.codes; ++i) seen[i] += codes[i] / 2;
  }
  EXPECT_THAT(seen, ::testing::Each(1));
  // 1 and 2 as the first and the second digit: 81 + 2 * 27 of 243, in 256ths and rounded up.
  std::vector<uint8_t> bytes(block.bytes);
  bytes[33] = 143;
  const std::vector<uint8_t> codes = codes_of(bytes);
  EXPECT_EQ(codes[160 + 1], 1);
  EXPECT_EQ(codes[160 + 16 + 1], 2);
  EXPECT_EQ(absl::c_count(codes, 0), block.codes - 2);
}

TEST(GgufFormat, CodesThatNoQuantizerWrites) {
  Linear ternary = MakeLinear(Named("TQ2_0"));
  ternary.Put<uint8_t>("weight", 0, 0x03);
  ternary.Put<uint8_t>("weight", 65, 0x3c);  // d = 1
  EXPECT_EQ(WeightValue(*ternary.Decode(), 0, 0), 2);
  EXPECT_EQ(WeightValue(*ternary.Decode(), 1, 0), -1);
  // E4M3 scales of a NaN, with a sign, and of a NaN with one.
  Linear linear = MakeLinear(Named("NVFP4"));
  std::vector<uint8_t>& bytes = linear.tensors["weight"].bytes;
  bytes[0] = 0x7f;
  bytes[1] = 0x80 | 0x38;
  bytes[4] = bytes[4 + 8] = 0x52;  // 1 and 3
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(WeightValue(*weight, 0, 0), 0);
  EXPECT_EQ(WeightValue(*weight, 16, 0), 1);
  EXPECT_EQ(WeightValue(*weight, 16 + 8, 0), 3);
  bytes[3] = 0xff;
  EXPECT_THAT(std::string(linear.Decode().status().message()),
              ::testing::HasSubstr("no number in block 0 of column 0"));
}

// Each sign has the bits of d, of zeros too.
TEST(GgufFormat, SignsAlone) {
  Linear linear = MakeLinear(Named("Q1_0"));
  linear.Put<uint16_t>("weight", 0, 0x7bff);  // 65504, the greatest
  linear.Put<uint8_t>("weight", 2 + 15, 0x80);
  linear.Put<uint8_t>("weight", 18 + 2, 1);  // d = 0
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(WeightValue(*weight, 126, 0), -65504);
  EXPECT_EQ(WeightValue(*weight, 127, 0), 65504);
  EXPECT_FALSE(std::signbit(WeightValue(*weight, 128, 0)));
  EXPECT_TRUE(std::signbit(WeightValue(*weight, 129, 0)));
}

TEST(GgufFormat, TheSameInARequest) {
  for (const GgufBlock& block : GgufBlocks()) {
    SCOPED_TRACE(std::string(block.name));
    Linear typed = MakeLinear(block);
    Tensor& weight = typed.tensors["weight"];
    for (size_t i = 0; i < weight.bytes.size(); ++i) {
      weight.bytes[i] = static_cast<uint8_t>(37 * i % 59);  // finite numbers in any type
    }
    Linear bytes = typed;
    bytes.tensors["weight"].dtype = "U8";
    bytes.tensors["weight"].shape = {3, 2 * block.bytes};
    bytes.Set("type", Setting::Typed(std::string(block.name)));
    const auto one = typed.Decode(), other = bytes.Decode();
    ASSERT_TRUE(one.ok() && other.ok()) << one.status() << other.status();
    EXPECT_EQ(one->scheme, other->scheme);
    EXPECT_EQ(one->codes, other->codes);
    EXPECT_EQ(one->scales, other->scales);
    EXPECT_EQ(one->zeros, other->zeros);
  }
}

// Blocks lie by rows of K, and their bits are those of the file.
TEST(GgufFormat, BlocksOfVectorCodesStayWhole) {
  int types = 0;
  for (const GgufBlock& block : GgufBlocks()) {
    if (block.code != CodeKind::kVector) continue;
    SCOPED_TRACE(std::string(block.name));
    ++types;
    EXPECT_EQ(VectorBlockBytes(block.vector), block.bytes);
    EXPECT_EQ(absl::AsciiStrToUpper(InfoOf(block.vector).name), block.name);
    Linear linear = MakeLinear(block);
    std::vector<uint8_t>& bytes = linear.tensors["weight"].bytes;
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(37 * i % 59);
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    for (int64_t n = 0; n < 3; ++n) {
      for (int64_t row : {0, 1}) {
        const auto from = bytes.begin() + (2 * n + row) * block.bytes;
        EXPECT_THAT(std::vector<uint8_t>(from, from + block.bytes),
                    ::testing::ElementsAreArray(weight->Block(256 * row, n), block.bytes));
      }
    }
  }
  EXPECT_EQ(types, VectorCodes().size());
}

// Column 2, second block.
TEST(GgufFormat, ElementsOfVectorCodes) {
  Linear iq3 = MakeLinear(Named("IQ3_S"));
  uint8_t* block = iq3.tensors["weight"].bytes.data() + 5 * 110;
  block[1] = 0x3c;         // d = 1
  block[2 + 9] = 1;        // elements 36 to 39 are point 257: 5, 7, 9, 5
  block[66 + 1] = 1 << 1;  // its upper bit
  block[74 + 4] = 0x20;    // 37 is negative
  block[106] = 0x20;       // s = 2 for elements 32 to 63
  const auto weight = iq3.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(WeightValue(*weight, 256 + 32, 2), 5);
  EXPECT_EQ(WeightValue(*weight, 256 + 36, 2), 25);
  EXPECT_EQ(WeightValue(*weight, 256 + 37, 2), -35);
  EXPECT_EQ(WeightValue(*weight, 256 + 38, 2), 45);
  EXPECT_EQ(WeightValue(*weight, 256 + 64, 2), 1);
  Linear iq1 = MakeLinear(Named("IQ1_M"));
  block = iq1.tensors["weight"].bytes.data() + 5 * 56;
  block[55] = 0x30;      // d = 1, from four bits here
  block[53] = 0xc0;      // and here
  block[48] = 3 << 3;    // s = 3 for elements 16 to 31
  block[32 + 1] = 0x80;  // the offset of elements 24 to 31 is negative
  const auto other = iq1.Decode();
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(WeightValue(*other, 256, 2), -0.875f);  // the first point is of -1 alone
  EXPECT_EQ(WeightValue(*other, 256 + 16, 2), -0.875f * 7);
  EXPECT_EQ(WeightValue(*other, 256 + 24, 2), -1.125f * 7);
}

// Column 1, second block: d = 2, dmin = 0.5; group 5 has scale 0b110001 and minimum 0b100110.
TEST(GgufFormat, ScalesOfASuperBlock) {
  Linear linear = MakeQ4K();
  uint8_t* const block = linear.tensors["weight"].bytes.data() + 3 * 144;
  const uint16_t d = FloatToHalf(2), dmin = FloatToHalf(0.5f);
  std::memcpy(block, &d, 2);
  std::memcpy(block + 2, &dmin, 2);
  block[4 + 1] = 3 << 6;
  block[4 + 5] = 2 << 6;
  block[4 + 9] = 1 | 6 << 4;
  block[16 + 2 * 32 + 7] = 9 << 4;  // code 7 of group 5
  const auto weight = linear.Decode();
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->Scale(8 + 5, 1), 2.0f * 49);
  EXPECT_EQ(weight->RealZero(8 + 5, 1), 0.5f * 38);
  EXPECT_EQ(WeightValue(*weight, 256 + 5 * 32 + 7, 1), 98.0f * 9 - 19);
  EXPECT_EQ(WeightValue(*weight, 256 + 5 * 32 + 8, 1), -19);
}

TEST(GgufFormat, ZerosOfFp4HaveNoSign) {
  struct Case {
    absl::string_view type;
    uint8_t one;   // the scale 1
    int64_t at;    // of the first codes
    int64_t high;  // the code in the upper half
  };
  for (const Case& c : {Case{"MXFP4", 127, 1, 16}, Case{"NVFP4", 0x38, 4, 8}}) {
    SCOPED_TRACE(std::string(c.type));
    Linear linear = MakeLinear(Named(c.type));
    linear.Put<uint8_t>("weight", 0, c.one);
    linear.Put<uint8_t>("weight", c.at, 0x98);
    const auto weight = linear.Decode();
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_FALSE(std::signbit(WeightValue(*weight, 0, 0)));
    EXPECT_EQ(WeightValue(*weight, c.high, 0), -0.5f);
  }
}

TEST(GgufFormat, Refusals) {
  const auto infinite = [](int64_t at) {
    return [=](Linear* l) { l->tensors["weight"].bytes[at] = 0x7c; };
  };
  const auto reshape = [](std::vector<int64_t> shape) {
    return [=](Linear* l) { l->tensors["weight"].shape = shape; };
  };
  const auto in_request = [](std::vector<int64_t> shape, const char* type) {
    return [=](Linear* l) {
      l->tensors["weight"].dtype = "U8";
      l->tensors["weight"].shape = shape;
      if (type != nullptr) l->Set("type", Setting::Typed(type));
    };
  };
  const int64_t most = INT64_MAX - 255;
  const std::vector<Refusal> refusals = {
      {"no weight", Without("weight"), {"\"weight\": got nothing, expected blocks [N, K], or U8"}},
      {"dtype", WithDtype("weight", "Q8_K"), {"\"weight\": got dtype Q8_K, expected Q4_0, Q4_1"}},
      {"type", in_request({3, 288}, nullptr), {"type: got nothing, expected Q4_0", "Q1_0"}},
      {"other type", in_request({3, 288}, "q8_k"), {"type: got \"q8_k\", expected Q4_0"}},
      {"empty type", in_request({3, 288}, ""), {"type: got \"\", expected Q4_0"}},
      {"rank", reshape({3, 512, 1}), {"\"weight\": got shape [3, 512, 1], expected rank 2"}},
      {"zero", reshape({0, 512}), {"got shape [0, 512], expected dimensions of at least 1"}},
      {"negative", reshape({3, -256}), {"expected dimensions of at least 1"}},
      {"blocks", reshape({3, 384}), {"got shape [3, 384], expected K in blocks of 256 (Q4_K)"}},
      {"bytes", in_request({3, 287}, "q4_k"), {"expected rows of whole blocks, 144 bytes each"}},
      {"huge", reshape({1 << 30, most}), {"expected a size below 2^63 bytes"}},
      {"huge rows", in_request({1, INT64_MAX / 144 * 144}, "q4_k"), {"below 2^63 bytes"}},
      {"short", Short("weight"), {"got 863 bytes, expected 864 for Q4_K [3, 512]"}},
      {"d", infinite(144 + 1), {"a scale that is no number in block 1 of column 0, expected"}},
      {"dmin", infinite(4 * 144 + 3), {"a scale that is no number in block 0 of column 2"}},
      {"bias", [](Linear* l) { l->Add("bias", "F16", {2}); }, {"\"bias\": got shape [2]"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    ExpectRefused(MakeQ4K(), refusal);
  }
}

TEST(GgufFormat, NoNumbersAmongTheScalesOfEveryType) {
  for (const GgufBlock& block : GgufBlocks()) {
    SCOPED_TRACE(std::string(block.name));
    Linear linear = MakeLinear(block);
    const bool behind =
        absl::StartsWith(block.name, "TQ") ||
        absl::c_linear_search(std::vector<absl::string_view>{"Q2_K", "Q3_K", "Q6_K"}, block.name);
    const int64_t at = behind ? block.bytes - 1 : block.code == CodeKind::kE2m1 ? 0 : 1;
    linear.Put<uint8_t>("weight", 5 * block.bytes + at, 0xff);
    // Four bits each of these make its d.
    for (int i = 49; block.name == "IQ1_M" && i < 56; i += 2) {
      linear.Put<uint8_t>("weight", 5 * block.bytes + i, 0xf0);
    }
    const auto weight = linear.Decode();
    EXPECT_EQ(weight.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(weight.status().message()),
                ::testing::HasSubstr("no number in block 1 of column 2"));
  }
}

}  // namespace
}  // namespace awqd
