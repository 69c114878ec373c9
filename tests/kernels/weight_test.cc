// HostWeight: Validate names the wrong part; values follow the formula of exact.h.
#include "kernels/weight.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/float8.h"
#include "kernels/exact.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

HostWeight Random(const char* scheme, bool order = false, bool factor = false) {
  return testing::RandomWeight({.k = 40,
                                .n = 12,
                                .scheme = ParseScheme(scheme).value(),
                                .bias = true,
                                .order = order,
                                .factor = factor});
}

std::string Error(const HostWeight& weight) { return Validate(weight).ToString(); }

// The definition, in double: of activations, and of the columns of a weight.
TEST(Hadamard, TransformsBlocks) {
  for (const int64_t size : {2, 16, 32, 256, 1024}) {
    for (const int64_t width : {1, 3}) {
      const Hadamard hadamard = {size, 0.25f};
      const std::vector<uint8_t> bytes = testing::RandomMatrix(size, width, DType::kFp32, 3);
      std::vector<float> got(size * width);
      for (int64_t i = 0; i < size * width; ++i) {
        got[i] = testing::GetElement(bytes, DType::kFp32, i);
      }
      TransformBlock(hadamard, got.data(), width);
      for (int64_t j = 0; j < size; ++j) {
        for (int64_t c = 0; c < width; ++c) {
          double sum = 0;
          for (int64_t i = 0; i < size; ++i) {
            const double value = testing::GetElement(bytes, DType::kFp32, i * width + c);
            sum += std::popcount(static_cast<uint64_t>(i & j)) % 2 == 0 ? value : -value;
          }
          ASSERT_NEAR(got[j * width + c], sum / 4, 1e-6 * static_cast<double>(size)) << size;
        }
      }
    }
  }
}

TEST(HostWeight, ValidateNamesThePart) {
  const HostWeight good = Random("w3g16z*c", true, true);
  ASSERT_TRUE(Validate(good).ok()) << Validate(good);
  HostWeight w = good;
  w.codes.pop_back();
  EXPECT_THAT(Error(w), HasSubstr("codes: got 239 bytes, expected 240"));
  w = good;
  w.codes[7] = 0x80;
  EXPECT_THAT(Error(w), HasSubstr("codes: got one above 7 in row 1, expected 3 bits"));
  w = good;
  w.zeros[5] = 8;
  EXPECT_THAT(Error(w), HasSubstr("zeros: got 8 at index 5, expected 0 to 7"));
  w = good;
  w.zeros.clear();
  EXPECT_THAT(Error(w), HasSubstr("zeros: got 0 bytes, expected 36"));
  w = good;
  w.scales.resize(70);
  EXPECT_THAT(Error(w), HasSubstr("scales: got 70 bytes, expected 72"));
  w = good;
  w.outer.pop_back();
  EXPECT_THAT(Error(w), HasSubstr("outer: got 11 values, expected 12"));
  w = good;
  w.factor[39] = kNan;
  EXPECT_THAT(Error(w), HasSubstr("factor: got NaN at index 39"));
  for (const int64_t size : {1, 6, 16, -8, 32768}) {
    w = good;
    w.hadamard = {size, 1};
    EXPECT_THAT(Error(w), HasSubstr(absl::StrCat("hadamard_size: got ", size,
                                                 ", expected a power "
                                                 "of two from 2 to 16384 that divides K = 40")));
  }
  for (const float scale : {0.0f, kNan, -1.0f, 1 / 0.0f}) {
    w = good;
    w.hadamard = {8, scale};
    EXPECT_THAT(Error(w), HasSubstr("scale of the transform: got "));
  }
  w = good;
  w.order[3] = w.order[4];
  EXPECT_THAT(Error(w), HasSubstr("order: got"));
  w = good;
  w.order[3] = 40;
  EXPECT_THAT(Error(w), HasSubstr("order: got 40 at index 3, expected each of 0 to 39 once"));
  w = good;
  w.bias.pop_back();
  EXPECT_THAT(Error(w), HasSubstr("bias: got 11 values"));
  w = Random("t4g16+fp32");
  w.table.pop_back();
  EXPECT_THAT(Error(w), HasSubstr("table: got 15 values, expected 16"));
}

// The formula in double, with each part as it is defined.
double InDouble(const HostWeight& w, int64_t row, int64_t col) {
  const QuantizationScheme& d = w.scheme;
  const int64_t group = row / w.group_rows();
  const double code = DecodeCode(d.code, w.table.data(), w.Code(row, col)),
               scale = w.Scale(group, col);
  const double zero = d.real_zeros() ? w.RealZero(group, col) : w.Zero(group, col);
  const double value =
      d.zero_kind == ZeroKind::kRealAfter ? code * scale - zero : (code - zero) * scale;
  return value * w.Outer(col);
}

TEST(HostWeight, BlocksOfVectorCodesHaveFiniteScales) {
  for (const VectorCodeInfo& info : VectorCodes()) {
    const HostWeight good =
        testing::RandomWeight({.k = 512, .n = 12, .scheme = Vectors(info.code)});
    ASSERT_TRUE(Validate(good).ok()) << Validate(good);
    HostWeight w = good;
    w.codes.pop_back();
    EXPECT_THAT(Error(w), HasSubstr("codes: got ")) << info.name;
    w = good;
    const int64_t bytes = VectorBlockBytes(info.code);
    std::fill_n(w.codes.begin() + (12 + 3) * bytes, bytes, uint8_t{0xfc});
    EXPECT_THAT(Error(w), HasSubstr("codes: got a scale that is no number in block 1 of column 3"))
        << info.name;
  }
}

// Blocks decode to the elements that the oracle has one by one, whatever the bits and the codebook.
TEST(Exact, BlocksOfATrellisHaveItsElements) {
  for (const TrellisCode code : kTrellisCodes) {
    for (int bits = 1; bits <= 8; ++bits) {
      const HostWeight w = testing::RandomWeight(
          {.k = 32, .n = 256, .scheme = Trellis(code, bits), .seed = uint64_t(bits)});
      ASSERT_TRUE(Validate(w).ok()) << Validate(w);
      std::vector<float> block(kTrellisTile * kTrellisColumns);
      DecodeTrellis(w.scheme, w.Block(16, 128), block.data());
      for (int col = 0; col < kTrellisColumns; ++col) {
        for (int row = 0; row < kTrellisTile; ++row) {
          ASSERT_EQ(block[col * kTrellisTile + row], WeightValue(w, 16 + row, 128 + col))
              << ToString(w.scheme) << " row " << row << " column " << col;
        }
      }
    }
  }
  HostWeight w =
      testing::RandomWeight({.k = 16, .n = 128, .scheme = Trellis(TrellisCode::k3Inst, 3)});
  w.codes.pop_back();
  EXPECT_THAT(Error(w), HasSubstr("codes: got 767 bytes, expected 768"));
}

TEST(Exact, IsTheFormulaUpToItsRoundings) {
  for (const char* text : {"w4g16z", "w8cs", "w8g16z+bf16", "w1g8s", "w4g16r", "w4g16o+fp32",
                           "w4g16z+int8*c", "e2m1g16+e4m3*t", "e2m1g8+e8m0", "e4m3b16x4+fp32",
                           "t4g16+fp32", "w4cs+fp32", "w8cz+1", "w5g7m3*t"}) {
    const HostWeight w = Random(text);
    ASSERT_TRUE(Validate(w).ok()) << text << Validate(w);
    const bool exact = w.scheme.is_integer() && !w.scheme.real_zeros() &&
                       w.scheme.outer == OuterKind::kNone && w.scheme.scale_dtype != DType::kFp32;
    for (int64_t i = 0; i < w.k * w.n; ++i) {
      const double want = InDouble(w, i / w.n, i % w.n);
      const double got = WeightValue(w, i / w.n, i % w.n);
      if (exact) {
        ASSERT_EQ(got, want) << text << " element " << i;
      } else {
        // Three roundings; the difference of a real zero may cancel up to the size of its terms.
        ASSERT_NEAR(got, want, (std::fabs(want) + 8) * 0x1p-22) << text << " element " << i;
      }
    }
  }
}

TEST(Float8, SpellsTheValuesOfItsSpecifications) {
  EXPECT_EQ(E4m3ToFloat(0x00), 0.0f);
  EXPECT_EQ(E4m3ToFloat(0x01), 0x1p-9f);
  EXPECT_EQ(E4m3ToFloat(0x08), 0x1p-6f);
  EXPECT_EQ(E4m3ToFloat(0x38), 1.0f);
  EXPECT_EQ(E4m3ToFloat(0xb9), -1.125f);
  EXPECT_EQ(E4m3ToFloat(0x7e), 448.0f);
  EXPECT_TRUE(std::isnan(E4m3ToFloat(0x7f)));
  EXPECT_TRUE(std::isnan(E4m3ToFloat(0xff)));
  EXPECT_EQ(E8m0ToFloat(127), 1.0f);
  EXPECT_EQ(E8m0ToFloat(0), 0x1p-127f);
  EXPECT_EQ(E8m0ToFloat(254), 0x1p127f);
  EXPECT_TRUE(std::isnan(E8m0ToFloat(255)));
  const float e2m1[16] = {0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  for (uint8_t i = 0; i < 16; ++i) EXPECT_EQ(E2m1ToFloat(i), e2m1[i]);
}

TEST(HostWeight, KnowsWhetherAWeightMayBeBeyondFp16) {
  const struct {
    const char* scheme;
    float zero;   // real ones
    float scale;  // with which every weight is within 65504, by less than 1 %
  } cases[] = {{"w4g16r+fp32", 17, 2047}, {"w4g16o:fp32+fp32", 504, 4333}, {"w6g16s+fp32", 0, 1039},
               {"w2g16r", 1, 16376},      {"e4m3g16+fp32", 0, 146},        {"w4g16s", 0, 8188}};
  for (const auto& test : cases) {
    HostWeight w = Random(test.scheme);
    const auto fill = [](std::vector<uint8_t>* elements, DType dtype, float value) {
      for (size_t i = 0; i < elements->size() / SizeOf(dtype); ++i) {
        StoreElement(elements->data(), dtype, static_cast<int64_t>(i), value);
      }
    };
    if (w.scheme.real_zeros()) fill(&w.zeros, w.scheme.zero_dtype, -test.zero);
    fill(&w.scales, *w.scheme.scale_dtype, -test.scale);
    EXPECT_FALSE(ShapeOf(w).large_scales) << test.scheme;
    StoreElement(w.scales.data(), *w.scheme.scale_dtype, 3, test.scale * 1.01f);
    EXPECT_TRUE(ShapeOf(w).large_scales) << test.scheme;
    // Infinite products are infinite whatever they are rounded to.
    StoreElement(w.scales.data(), *w.scheme.scale_dtype, 3, std::numeric_limits<float>::infinity());
    EXPECT_FALSE(ShapeOf(w).large_scales) << test.scheme;
  }
}

TEST(HostWeight, CountsTheOctavesOfItsScales) {
  HostWeight w = Random("w4g8z+bf16");
  const auto set = [&](int64_t cell, uint16_t bits) { std::memcpy(&w.scales[cell * 2], &bits, 2); };
  for (int64_t cell = 0; cell < 60; ++cell) set(cell, 0x3f80);  // 1
  EXPECT_EQ(ShapeOf(w).scale_octaves, 0);
  set(5, 0x3f00);   // column 5: 0.5
  set(17, 0x4000);  // column 5: 2
  set(29, 0x0000);  // zeros do not count
  set(6, 0x4080);   // column 6: 4
  EXPECT_EQ(ShapeOf(w).scale_octaves, 2);
}

}  // namespace
}  // namespace awqd
