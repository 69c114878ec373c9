// Conversions of fp16 and bf16: every bit pattern, and every rounding case between neighbours.
#include "kernels/base/half.h"

#include <bit>
#include <cmath>
#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/exact.h"

namespace awqd {
namespace {

// The value of the bits, from the definition of the format.
double HalfValue(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -magnitude : magnitude;
}

TEST(Half, EveryPatternDecodesToItsValue) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t h = static_cast<uint16_t>(bits);
    const float got = HalfToFloat(h);
    if ((h >> 10 & 31) == 31) {
      EXPECT_EQ(std::isnan(got), (h & 1023) != 0) << bits;
      EXPECT_EQ(std::isinf(got), (h & 1023) == 0) << bits;
      continue;
    }
    ASSERT_EQ(static_cast<double>(got), HalfValue(h)) << bits;
    ASSERT_EQ(std::signbit(got), (h & 0x8000) != 0) << bits;
  }
}

TEST(Half, EveryPatternSurvivesARoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t h = static_cast<uint16_t>(bits);
    const uint16_t back = FloatToHalf(HalfToFloat(h));
    const bool nan = (h & 0x7fff) > 0x7c00;
    ASSERT_EQ(back, nan ? h | 0x200 : h) << bits;
  }
}

// A number halfway between neighbours rounds to the even one, any other to the nearer.
TEST(Half, RoundsToNearestEvenBetweenAllNeighbours) {
  for (uint16_t low = 0; low < 0x7bff; ++low) {
    const float middle = (HalfToFloat(low) + HalfToFloat(low + 1)) / 2;
    const uint16_t even = low % 2 == 0 ? low : low + 1;
    ASSERT_EQ(FloatToHalf(middle), even) << low;
    ASSERT_EQ(FloatToHalf(std::nextafterf(middle, 0)), low) << low;
    ASSERT_EQ(FloatToHalf(std::nextafterf(middle, 1e9f)), low + 1) << low;
    ASSERT_EQ(FloatToHalf(-middle), even | 0x8000) << low;
  }
  EXPECT_EQ(FloatToHalf(65519.996f), 0x7bff);
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToHalf(0x1p-25f), 0);
  EXPECT_EQ(FloatToHalf(0x1.000002p-25f), 1);
}

TEST(Bf16, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    const float low = Bf16ToFloat(static_cast<uint16_t>(bits));
    const float middle = std::bit_cast<float>(std::bit_cast<uint32_t>(low) + 0x8000u);
    ASSERT_EQ(FloatToBf16(low), bits);
    ASSERT_EQ(FloatToBf16(middle), bits % 2 == 0 ? bits : bits + 1);
    ASSERT_EQ(FloatToBf16(std::nextafterf(middle, 0)), bits);
    ASSERT_EQ(FloatToBf16(std::nextafterf(middle, HUGE_VALF)), bits + 1);
  }
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_EQ(FloatToBf16(HUGE_VALF), 0x7f80);
}

// A double just beside a tie must not be rounded to the tie first.
TEST(Elements, DoublesAreRoundedOnce) {
  uint16_t out = 0;
  StoreElement(&out, DType::kFp16, 0, 1 + 0x1p-11 + 0x1p-40);
  EXPECT_EQ(out, 0x3c01);
  StoreElement(&out, DType::kFp16, 0, 1 + 0x1p-11);
  EXPECT_EQ(out, 0x3c00);
  StoreElement(&out, DType::kFp16, 0, 1 + 3 * 0x1p-11 - 0x1p-40);
  EXPECT_EQ(out, 0x3c01);
  StoreElement(&out, DType::kBf16, 0, -(1 + 0x1p-8 + 0x1p-45));
  EXPECT_EQ(out, 0xbf81);
}

}  // namespace
}  // namespace awqd
