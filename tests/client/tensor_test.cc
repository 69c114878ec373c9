// Tensor conversions against slow, independent definitions; shapes and their limits.
#include "client/tensor.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/half.h"

namespace awqd::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Value of a finite fp16 pattern by its definition.
double HalfValue(int bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

TEST(HalfTest, DecodesEveryPattern) {
  for (int bits = 0; bits < 65536; ++bits) {
    const float value = HalfToFloat(static_cast<uint16_t>(bits));
    if ((bits & 0x7fff) > 0x7c00) {
      ASSERT_TRUE(std::isnan(value)) << bits;
    } else if ((bits & 0x7fff) == 0x7c00) {
      ASSERT_TRUE(std::isinf(value)) << bits;
    } else {
      ASSERT_EQ(value, HalfValue(bits)) << bits;
    }
    ASSERT_EQ(std::signbit(value), bits >= 0x8000) << bits;
  }
}

TEST(HalfTest, EncodeInvertsDecode) {
  for (int bits = 0; bits < 65536; ++bits) {
    const uint16_t expected = (bits & 0x7fff) > 0x7c00 ? bits | 0x200 : bits;
    ASSERT_EQ(FloatToHalf(HalfToFloat(static_cast<uint16_t>(bits))), expected) << bits;
  }
}

// Between every two neighbours: the midpoint rounds to the even one, its float neighbours to the
// nearer one.
TEST(HalfTest, RoundsToNearestEven) {
  for (int low = 0; low < 0x7c00; ++low) {
    const double above = low == 0x7bff ? 65536.0 : HalfValue(low + 1);
    const float middle = static_cast<float>((HalfValue(low) + above) / 2);
    ASSERT_EQ(FloatToHalf(middle), low + (low & 1)) << low;
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, 0.0f)), low) << low;
    ASSERT_EQ(FloatToHalf(std::nextafter(middle, 1e6f)), low + 1) << low;
    ASSERT_EQ(FloatToHalf(-middle), 0x8000 | (low + (low & 1))) << low;
  }
  EXPECT_EQ(FloatToHalf(std::numeric_limits<float>::max()), 0x7c00);
  EXPECT_EQ(FloatToHalf(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(Bf16Test, RoundsToNearestEven) {
  for (uint32_t low = 0; low < 0x7f80; ++low) {
    const auto from_bits = [](uint32_t bits) {
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    };
    ASSERT_EQ(FloatToBf16(from_bits(low << 16 | 0x8000)), low + (low & 1)) << low;
    ASSERT_EQ(FloatToBf16(from_bits(low << 16 | 0x7fff)), low) << low;
    ASSERT_EQ(FloatToBf16(from_bits(low << 16 | 0x8001)), low + 1) << low;
  }
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::nanf("")))));
  EXPECT_EQ(FloatToBf16(-1.0f), 0xbf80);
}

TEST(TensorTest, RoundTripsFloats) {
  for (const DType dtype : {v1::FP16, v1::BF16, v1::FP32}) {
    const auto tensor = Tensor::FromFloats(dtype, {2, 2}, {0.5f, -1.0f, 2.0f, 0.0f});
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    EXPECT_EQ(tensor->bytes.size(), 4 * SizeOf(dtype));
    EXPECT_THAT(*tensor->ToFloats(), ElementsAre(0.5f, -1.0f, 2.0f, 0.0f));
  }
}

TEST(TensorTest, RefusesWhatDoesNotFit) {
  EXPECT_THAT(Tensor::FromFloats(v1::FP16, {3}, {1.0f}).status().message(),
              HasSubstr("got 1 values for shape [3], expected 3"));
  EXPECT_FALSE(Tensor::FromFloats(v1::INT8, {1}, {1.0f}).ok());
  EXPECT_FALSE((Tensor{v1::FP16, {2}, "abc"}).Check().ok());
  EXPECT_FALSE((Tensor{v1::DTYPE_UNSPECIFIED, {}, ""}).Check().ok());
  EXPECT_FALSE((Tensor{v1::INT32, {1}, "abcd"}).ToFloats().ok());
}

TEST(TensorTest, CountsElements) {
  EXPECT_EQ(*ElementCount({}), 1);
  EXPECT_EQ(*ElementCount({3, 0, 5}), 0);
  EXPECT_EQ(*ElementCount({2, 3}), 6);
  EXPECT_FALSE(ElementCount({-1}).ok());
  EXPECT_FALSE(ElementCount({int64_t{1} << 32, int64_t{1} << 31}).ok());
  EXPECT_FALSE(ElementCount({1, 1, 1, 1, 1, 1, 1, 1, 1}).ok());
}

TEST(TensorTest, ChecksWhatAServerSends) {
  EXPECT_EQ(FromProto(ToProto({v1::FP16, {1}, "ab"}))->bytes, "ab");
  v1::Tensor values;
  values.set_dtype(v1::FP32);
  values.mutable_floats()->add_values(1);
  EXPECT_EQ(FromProto(values).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(FromProto(ToProto({v1::FP16, {2}, "ab"})).status().code(), absl::StatusCode::kInternal);
}

TEST(TensorTest, ParsesDTypes) {
  EXPECT_EQ(*ParseDType("Bf16"), v1::BF16);
  EXPECT_FALSE(ParseDType("DTYPE_UNSPECIFIED").ok());
  EXPECT_FALSE(ParseDType("float").ok());
}

}  // namespace
}  // namespace awqd::client
