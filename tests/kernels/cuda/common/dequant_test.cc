// Exhaustive tests of the decoders in kernels/cuda/common/dequant.cuh by their host code.
#include "kernels/cuda/common/dequant.cuh"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>

namespace awqd::cuda {
namespace {

constexpr int kNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

uint32_t PackInt4(const std::array<int, 8>& codes) {
  uint32_t word = 0;
  for (int e = 0; e < 8; ++e) word |= static_cast<uint32_t>(codes[e]) << (4 * kNibble[e]);
  return word;
}

// The eight codes first, first + 1, ... modulo 16.
std::array<int, 8> CodesFrom(int first) {
  std::array<int, 8> codes;
  for (int e = 0; e < 8; ++e) codes[e] = (first + e) % 16;
  return codes;
}

uint32_t PackInt8(int e0, int e1, int e2, int e3) {
  return static_cast<uint32_t>(e0 | e2 << 8 | e1 << 16) | static_cast<uint32_t>(e3) << 24;
}

uint16_t Lane(const Pairs& pairs, int e) { return pairs.v[e / 2] >> (16 * (e % 2)) & 0xffff; }
uint16_t Lane(const uint32_t (&pairs)[2], int e) { return pairs[e / 2] >> (16 * (e % 2)) & 0xffff; }

struct ZerosFp16 {
  explicit ZerosFp16(int z) {
    const uint32_t zeros = Both(z | z << 4);
    for (int i = 0; i < 4; ++i) v[i] = i % 2 == 0 ? LowZeroFp16(zeros) : HighZeroFp16(zeros);
  }
  uint32_t v[4];
};

struct ZerosBf16 {
  explicit ZerosBf16(int z) {
    const uint32_t zeros = Both(z | z << 4);
    for (int i = 0; i < 4; ++i) v[i] = i % 2 == 0 ? LowZeroBf16(zeros) : HighZeroBf16(zeros);
  }
  uint32_t v[4];
};

struct All {
  explicit All(uint32_t word) {
    for (uint32_t& w : v) w = word;
  }
  uint32_t v[4];
};

bool IsFinite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

TEST(Prmt, PicksBytesAndSigns) {
  EXPECT_EQ(Prmt(0x83FF0180, 0x64646464, 0x5250), 0x64FF6480u);
  EXPECT_EQ(Prmt(0x83FF0180, 0x64646464, 0x5351), 0x64836401u);
  EXPECT_EQ(Prmt(0x33221180, 0x77665544, 0x7654), 0x77665544u);
  // Bit 3 replicates the sign: byte 0 is negative, byte 1 is not.
  EXPECT_EQ(Prmt(0x33221180, 0, 0x9898), 0x00FF00FFu);
}

TEST(Lop3, FollowsItsTable) {
  const uint32_t a = 0xF0F0A5C3, b = 0xCCCC5A3C, c = 0xAAAA9669;
  EXPECT_EQ((Lop3<kAndOr>(a, b, c)), (a & b) | c);
  EXPECT_EQ((Lop3<0x96>(a, b, c)), a ^ b ^ c);
  EXPECT_EQ((Lop3<0x80>(a, b, c)), a & b & c);
}

TEST(PackedArithmetic, RoundsOnce) {
  // 2049 is halfway between the FP16 neighbours 2048 and 2050; 2^-24 more decides.
  const uint16_t one = FloatToHalf(1), big = FloatToHalf(2048), tiny = FloatToHalf(0x1p-24f);
  EXPECT_EQ(host::FmaFp16(one, one, big), FloatToHalf(2048));
  EXPECT_EQ(host::FmaFp16(FloatToHalf(1.0009765625f), one, big), FloatToHalf(2050));
  EXPECT_EQ(host::FmaFp16(tiny, tiny, FloatToHalf(3)), FloatToHalf(3));
  EXPECT_EQ(host::FmaFp16(FloatToHalf(60000), FloatToHalf(2), 0), 0x7c00);
  EXPECT_EQ(Mul2Fp16(0x80003C00, 0x3C003C00), 0x80003C00u) << "a zero product keeps its sign";
  EXPECT_EQ(Sub2Fp16(0x3C003C00, 0x3C003C00), 0u);
}

TEST(Int4MinusZero, ThePinnedWordIsZeroToSeven) {
  const Pairs got = Int4MinusZeroFp16(0x75316420, ZerosFp16(0).v);
  for (int e = 0; e < 8; ++e) EXPECT_EQ(Lane(got, e), FloatToHalf(e)) << e;
}

// Every (q, z) at every position of the word: the subtraction is exact, with BF16 in 64ths.
TEST(Int4MinusZero, IsExactForEveryPair) {
  for (int z = 0; z < 16; ++z) {
    for (int first = 0; first < 16; ++first) {
      const std::array<int, 8> codes = CodesFrom(first);
      const Pairs fp16 = Int4MinusZeroFp16(PackInt4(codes), ZerosFp16(z).v);
      const Pairs bf16 = Int4MinusZeroBf16(PackInt4(codes), ZerosBf16(z).v);
      for (int e = 0; e < 8; ++e) {
        ASSERT_EQ(Lane(fp16, e), FloatToHalf(codes[e] - z)) << codes[e] << " - " << z;
        ASSERT_EQ(Lane(bf16, e), FloatToBf16((codes[e] - z) / 64.0f)) << codes[e] << " - " << z;
      }
    }
  }
}

// All 256 (q, z) x all 65536 scales: one rounding of (q - z) * s.
TEST(ScaleFp16, RoundsTheProductOnce) {
  for (int z = 0; z < 16; ++z) {
    const ZerosFp16 zeros(z);
    for (int first = 0; first < 16; first += 8) {
      const std::array<int, 8> codes = CodesFrom(first);
      const uint32_t word = PackInt4(codes);
      for (uint32_t s = 0; s < 65536; ++s) {
        if (!IsFinite(s)) continue;
        const Pairs got = ScaleFp16(Int4MinusZeroFp16(word, zeros.v), All(Both(s)).v);
        for (int e = 0; e < 8; ++e) {
          ASSERT_EQ(Lane(got, e), FloatToHalf((codes[e] - z) * HalfToFloat(s)))
              << "(" << codes[e] << " - " << z << ") * fp16 " << s;
        }
      }
    }
  }
}

TEST(SplitToBf16, IsExactForEveryScale) {
  for (uint32_t s = 0; s < 65536; ++s) {
    const SplitScale splits = SplitToBf16(s);
    const float high = Bf16ToFloat(splits.high & 0xffff), low = Bf16ToFloat(splits.low & 0xffff);
    ASSERT_EQ(splits.high, Both(splits.high & 0xffff)) << s;
    ASSERT_EQ(splits.low, Both(splits.low & 0xffff)) << s;
    if (IsFinite(s)) {
      ASSERT_EQ(high + low, 64 * HalfToFloat(s)) << s;
    } else {
      ASSERT_FALSE(std::isfinite(high)) << s;
      ASSERT_TRUE(std::isfinite(low)) << s;
    }
  }
}

// The product with an 11-bit scale, rounded to BF16 once, although every operation is in BF16.
TEST(ScaleBf16, RoundsTheProductOnce) {
  for (int z = 0; z < 16; ++z) {
    const ZerosBf16 zeros(z);
    for (int first = 0; first < 16; first += 8) {
      const std::array<int, 8> codes = CodesFrom(first);
      const uint32_t word = PackInt4(codes);
      for (uint32_t s = 0; s < 65536; ++s) {
        if (!IsFinite(s)) continue;
        const SplitScale splits = SplitToBf16(s);
        const Pairs got =
            ScaleBf16(Int4MinusZeroBf16(word, zeros.v), All(splits.high).v, All(splits.low).v);
        for (int e = 0; e < 8; ++e) {
          const float exact = (codes[e] - z) * HalfToFloat(s);
          // The sign of a zero product may differ: +0 and -0 are the same weight.
          if (exact == 0) {
            ASSERT_EQ(Lane(got, e) & 0x7fff, 0) << s;
          } else {
            ASSERT_EQ(Lane(got, e), FloatToBf16(exact))
                << "(" << codes[e] << " - " << z << ") * fp16 " << s;
          }
        }
      }
    }
  }
}

TEST(Int8MinusZero, IsExactForEveryPair) {
  for (int z = 0; z < 256; ++z) {
    const uint32_t zero = Both(FloatToHalf(1024 + z));
    for (int q = 0; q < 256; ++q) {
      uint32_t got[2];
      Int8MinusZeroFp16(PackInt8(q, z, 255 - q, q), zero, got);
      ASSERT_EQ(Lane(got, 0), FloatToHalf(q - z));
      ASSERT_EQ(Lane(got, 1), FloatToHalf(0));
      ASSERT_EQ(Lane(got, 2), FloatToHalf(255 - q - z));
      ASSERT_EQ(Lane(got, 3), FloatToHalf(q - z));
    }
  }
}

// Converting a byte through small BF16 numbers gives the same as through FP32.
TEST(Int8MinusZeroBf16, IsExactForEveryPair) {
  for (int z = 0; z < 256; ++z) {
    const uint32_t zero = ByteZeroBf16(Both(z));
    ASSERT_EQ(ByteZeroFp16(Both(z)), Both(FloatToHalf(1024 + z)));
    for (int q = 0; q < 256; ++q) {
      const int e[4] = {q, z, 255 - q, (q + 129) % 256};
      uint32_t got[2];
      Int8MinusZeroBf16(PackInt8(e[0], e[1], e[2], e[3]), zero, got);
      for (int i = 0; i < 4; ++i) ASSERT_EQ(Lane(got, i), FloatToBf16((e[i] - z) / 64.0f));
    }
  }
}

// Codes of a step in the layout's places: 2-bit codes at bit 2 p + 16 (e % 2), 1-bit codes two bits
// higher.
uint32_t PackPairs(const std::array<int, 8>& codes, int first_bit) {
  uint32_t word = 0;
  for (int e = 0; e < 8; ++e) {
    word |= static_cast<uint32_t>(codes[e]) << (first_bit + 2 * (e / 2) + 16 * (e % 2));
  }
  return word;
}

// Every code at every place, with its neighbours' bits set and clear, and with the bits outside of
// the step set: rows r and r + 8 have zeros of their own.
template <int kBits>
void ExpectNarrowCodesAreExact() {
  constexpr int kCodes = 1 << kBits;
  for (int first = 0; first < kCodes; ++first) {
    for (int step = 0; step < kCodes; ++step) {
      std::array<int, 8> codes, low, high;
      for (int e = 0; e < 8; ++e) {
        codes[e] = (first + step * e) % kCodes;
        low[e] = kBits == 3 ? codes[e] & 3 : codes[e];
        high[e] = kBits == 3 ? codes[e] >> 2 : codes[e];
      }
      const uint32_t two = PackPairs(low, 0) | 0xff00ff00, one = PackPairs(high, 2) | 0xfeabfeab;
      for (int z = 0; z < kCodes * kCodes; ++z) {
        const int zeros[2] = {z % kCodes, z / kCodes};
        const uint32_t both = Both(zeros[0] | zeros[1] << 4);
        uint32_t fp16_zeros[4];
        kBits == 1 ? BitZerosFp16(both, fp16_zeros) : PairZerosFp16(both, fp16_zeros);
        const uint32_t b0 = LowZeroBf16(both), b1 = HighZeroBf16(both);
        const uint32_t bf16_zeros[4] = {b0, b1, b0, b1};
        const Pairs fp16 = kBits == 1   ? MinusZeroFp16<1>(Int1PlusBias(one), fp16_zeros)
                           : kBits == 2 ? MinusZeroFp16<0>(Int2PlusBias(two), fp16_zeros)
                                        : MinusZeroFp16<0>(Int3PlusBias(two, one), fp16_zeros);
        const Pairs bf16 = kBits == 1   ? Int1MinusZeroBf16(one, bf16_zeros)
                           : kBits == 2 ? Int2MinusZeroBf16(two, bf16_zeros)
                                        : Int3MinusZeroBf16(two, one, bf16_zeros);
        for (int e = 0; e < 8; ++e) {
          const int want = codes[e] - zeros[e / 2 % 2];
          ASSERT_EQ(Lane(fp16, e), FloatToHalf(want)) << codes[e] << " at " << e;
          ASSERT_EQ(Lane(bf16, e), FloatToBf16(want / 64.0f)) << codes[e] << " at " << e;
        }
      }
    }
  }
}

TEST(Int1MinusZero, IsExactForEveryCode) { ExpectNarrowCodesAreExact<1>(); }
TEST(Int2MinusZero, IsExactForEveryCode) { ExpectNarrowCodesAreExact<2>(); }
TEST(Int3MinusZero, IsExactForEveryCode) { ExpectNarrowCodesAreExact<3>(); }

}  // namespace
}  // namespace awqd::cuda
