// AutoAWQ's tensors with widths other than 4 bits, and without zero points.
#include <random>
#include <string>

#include "tests/kernels/formats/linear.h"

namespace awqd {
namespace {

Linear MakeLinear(int bits, int64_t k, int64_t n, int64_t group_size) {
  Linear out = {.format = &kAwqFormat};
  const int64_t words = (n * bits + 31) / 32;
  out.Set("bits", bits);
  out.Set("group_size", group_size);
  out.Add("qweight", "I32", {k, words});
  out.Add("qzeros", "I32", {k / group_size, words});
  out.Add("scales", "BF16", {k / group_size, n});
  return out;
}

TEST(AwqFormat, WithoutZeroPointsTheyAreTheMiddle) {
  for (const int bits : {2, 4, 8}) {
    Linear linear = MakeLinear(bits, 64, 16, 32);
    linear.Set("zero_point", Setting::Literal(false));
    for (uint8_t& byte : linear.tensors["qzeros"].bytes) {
      byte = bits == 8 ? 0x80 : bits == 4 ? 0x88 : 0xaa;
    }
    for (int i = 0; i < 2; ++i) {
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
      EXPECT_EQ(weight->scheme, Symmetric(bits, 32, DType::kBf16)) << bits;
      linear.tensors.erase("qzeros");
    }
  }
}

// Dense words of every other width, packed a bit at a time.
TEST(AwqFormat, OtherWidthsAreInNaturalOrder) {
  std::mt19937 random(11);
  for (int bits = 2; bits <= 8; ++bits) {
    if (bits == 4) continue;
    for (const int n : {32, 40, 7}) {
      Linear linear = MakeLinear(bits, 16, n, 8);
      const int words = (n * bits + 31) / 32;
      for (const std::string name : {"qweight", "qzeros"}) {
        for (uint8_t& byte : linear.tensors[name].bytes) byte = static_cast<uint8_t>(random());
      }
      const auto weight = linear.Decode();
      ASSERT_TRUE(weight.ok()) << weight.status();
      ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
      EXPECT_EQ(weight->scheme, Asymmetric(bits, 8, DType::kBf16));
      const auto code = [&](const std::string& name, int row, int col) {
        int out = 0;
        for (int bit = 0; bit < bits; ++bit) {
          const int at = row * words * 32 + col * bits + bit;
          out |= (linear.tensors[name].bytes[at / 8] >> (at % 8) & 1) << bit;
        }
        return out;
      };
      int wrong = 0;
      for (int row = 0; row < 16; ++row) {
        for (int col = 0; col < n; ++col) {
          wrong += weight->Code(row, col) != code("qweight", row, col);
          wrong += weight->Zero(row / 8, col) != code("qzeros", row / 8, col);
        }
      }
      EXPECT_EQ(wrong, 0) << bits << " " << n;
    }
  }
}

}  // namespace
}  // namespace awqd
