// Exhaustive tests of the decoders in kernels/cuda/common/float_codes.cuh by their host code.
#include "kernels/cuda/common/float_codes.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "kernels/base/float8.h"

namespace awqd::cuda {
namespace {

// The positions of the eight numbers in a word of 4-bit codes.
constexpr int kNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

uint16_t Lane(const Pairs& pairs, int e) { return pairs.v[e / 2] >> (16 * (e % 2)) & 0xffff; }

// `code` at place e, and other codes around it that would show if they leaked.
uint32_t WordWith(int e, uint32_t code, uint32_t others) {
  return (others * 0x11111111u & ~(0xfu << 4 * kNibble[e])) | code << 4 * kNibble[e];
}

TEST(E2m1, DecodesEveryCodeInEveryPlace) {
  for (int e = 0; e < 8; ++e) {
    for (uint32_t code = 0; code < 16; ++code) {
      for (uint32_t others = 0; others < 16; ++others) {
        const uint32_t word = WordWith(e, code, others);
        const float want = E2m1ToFloat(static_cast<uint8_t>(code));
        EXPECT_EQ(Lane(E2m1ToFp16(word), e), FloatToHalf(want)) << "code " << code << " at " << e;
        EXPECT_EQ(Lane(E2m1ToBf16(word), e), FloatToBf16(want)) << "code " << code << " at " << e;
      }
    }
  }
}

TEST(E2m1, BecomesE4m3TimesAPowerOfTwo) {
  for (int exponent = -4; exponent <= 7; ++exponent) {
    const float scale = std::ldexp(1.0f, exponent);
    const E4m3Table table = E2m1TableOf(FloatToHalf(scale));
    const E4m3Table other = E2m1TableOf(FloatToHalf(exponent < 7 ? 128.0f : 0.0625f));
    for (int e = 0; e < 8; ++e) {
      const int row = kNibble[e] % 2, byte = kNibble[e] / 2;
      for (uint32_t code = 0; code < 16; ++code) {
        for (uint32_t others = 0; others < 16; ++others) {
          uint32_t bytes[2];
          E2m1ToE4m3(WordWith(e, code, others), row == 0 ? table : other, row == 0 ? other : table,
                     bytes);
          const float got = E4m3ToFloat(bytes[row] >> 8 * byte & 0xff);
          EXPECT_EQ(got * kE2m1UnitE4m3, E2m1ToFloat(static_cast<uint8_t>(code)) * scale)
              << "code " << code << " at " << e << " exponent " << exponent;
        }
      }
    }
  }
}

TEST(E2m1, OfAScaleThatIsNoNumberIsNan) {
  for (uint32_t scale : {0x7e00u, 0x7c00u, 0xfe00u}) {
    const E4m3Table table = E2m1TableOf(scale);
    uint32_t bytes[2];
    E2m1ToE4m3(0x76543210, table, table, bytes);
    for (uint32_t word : bytes) {
      for (int byte = 0; byte < 4; ++byte) {
        EXPECT_TRUE(std::isnan(E4m3ToFloat(word >> 8 * byte & 0xff)));
      }
    }
  }
}

void ExpectE4m3(uint8_t code, float got, bool bf16) {
  const float want = E4m3ToFloat(code);
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << int{code} << (bf16 ? " bf16" : " fp16");
  } else {
    EXPECT_EQ(got, want) << int{code} << (bf16 ? " bf16" : " fp16");
    EXPECT_EQ(std::signbit(got), std::signbit(want)) << int{code};
  }
}

TEST(E4m3, DecodesEveryCodeInEveryPlace) {
  for (uint32_t code = 0; code < 256; ++code) {
    for (uint32_t others : {0x00u, 0x7fu, 0x80u, 0xffu, 0x08u}) {
      for (int byte = 0; byte < 4; ++byte) {
        const uint32_t word = (others * 0x01010101u & ~(0xffu << 8 * byte)) | code << 8 * byte;
        const uint32_t pair = byte % 2 == 0 ? LowerBytes(word) : UpperBytes(word);
        const int shift = byte / 2 * 16;
        const uint16_t half = E4m3PairToFp16(pair) >> shift & 0xffff;
        const uint16_t bf16 = E4m3PairToBf16(pair) >> shift & 0xffff;
        ExpectE4m3(static_cast<uint8_t>(code), HalfToFloat(half) * 256, false);
        ExpectE4m3(static_cast<uint8_t>(code), Bf16ToFloat(bf16), true);
      }
    }
  }
}

TEST(PairRows, AreThoseOfBothCodesInEveryPlace) {
  for (int pair = 0; pair < 4; ++pair) {
    for (uint32_t first = 0; first < 16; ++first) {
      for (uint32_t second = 0; second < 16; ++second) {
        for (uint32_t others = 0; others < 16; ++others) {
          uint32_t word = WordWith(2 * pair, first, others);
          word = (word & ~(0xfu << 4 * kNibble[2 * pair + 1])) | second
                                                                     << 4 * kNibble[2 * pair + 1];
          uint32_t rows[4];
          PairRows(word, rows);
          EXPECT_EQ(rows[pair], (first + 16 * second) * kPairTableRow)
              << "codes " << first << " and " << second << " at " << pair;
        }
      }
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
