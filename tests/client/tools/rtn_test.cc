// Round to nearest: its formula, its limits, its search.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "client/tools/quantize.h"
#include "kernels/exact.h"

namespace awqd::tools {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Made {
  RtnGroup group;
  std::vector<uint8_t> codes;
  bool ok = false;
};

Made Group(const std::vector<float>& values, const RtnOptions& options, DType type = DType::kFp16) {
  Made out;
  out.codes.resize(values.size());
  out.ok = QuantizeGroup(values, options, type, &out.group, out.codes.data());
  return out;
}

TEST(Rtn, AsymmetricByHand) {
  // Range [-1, 2] in 15 steps of 0.2, which FP16 holds as 0.199951171875; z = 5.
  const Made got = Group({-1.0f, 0.0f, 0.29f, 2.0f}, {.bits = 4});
  ASSERT_TRUE(got.ok);
  EXPECT_EQ(got.group.scale, 0.199951171875f);
  EXPECT_EQ(got.group.zero, 5);
  EXPECT_THAT(got.codes, ElementsAre(0, 5, 6, 15));
}

TEST(Rtn, ZeroIsInTheRange) {
  const Made above = Group({3.0f, 4.0f}, {.bits = 2});
  EXPECT_EQ(above.group.zero, 0);
  EXPECT_EQ(above.group.scale, HalfToFloat(FloatToHalf(4.0f / 3)));
  EXPECT_THAT(above.codes, ElementsAre(2, 3));
  const Made below = Group({-3.0f, -4.0f}, {.bits = 2});
  EXPECT_EQ(below.group.zero, 3);
  EXPECT_THAT(below.codes, ElementsAre(1, 0));
}

TEST(Rtn, SymmetricByHand) {
  // max / 7 = 1 and -min / 8 = 0.5.
  const Made got = Group({7.0f, -4.0f, 0.4f}, {.bits = 4, .symmetric = true});
  EXPECT_EQ(got.group.scale, 1.0f);
  EXPECT_EQ(got.group.zero, 8);
  EXPECT_THAT(got.codes, ElementsAre(15, 4, 8));
  EXPECT_EQ(Group({1.0f, -8.0f}, {.bits = 4, .symmetric = true}).group.scale, 1.0f);
}

TEST(Rtn, ZerosAndTinyNumbers) {
  const Made zeros = Group({0.0f, -0.0f}, {.bits = 4});
  EXPECT_EQ(zeros.group.scale, 1.0f);
  EXPECT_THAT(zeros.codes, ElementsAre(zeros.group.zero, zeros.group.zero));
  const Made tiny = Group({1e-12f, 0.0f}, {.bits = 4});
  EXPECT_EQ(tiny.group.scale, 0x1p-24f);  // FP16's smallest
  EXPECT_FALSE(Group({1e9f}, {.bits = 4}).ok);
  EXPECT_TRUE(Group({1e9f}, {.bits = 4}, DType::kBf16).ok);
  EXPECT_FALSE(Group({3e38f, -3e38f}, {.bits = 2}).ok);
}

double SquaredError(const std::vector<float>& values, const Made& made) {
  double sum = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double error = (made.codes[i] - made.group.zero) * made.group.scale - values[i];
    sum += error * error;
  }
  return sum;
}

TEST(Rtn, TheSearchNeverLosesAndHelpsWithOutliers) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  int better = 0;
  for (int round = 0; round < 50; ++round) {
    std::vector<float> values(128);
    for (float& value : values) value = normal(random);
    values[5] = 6.0f;
    for (const bool symmetric : {false, true}) {
      const RtnOptions plain = {.bits = 3, .symmetric = symmetric};
      RtnOptions search = plain;
      search.search = true;
      const double a = SquaredError(values, Group(values, plain));
      const double b = SquaredError(values, Group(values, search));
      EXPECT_LE(b, a);
      better += b < 0.9 * a ? 1 : 0;
    }
  }
  EXPECT_GT(better, 80);
}

TEST(Rtn, EveryElementIsWithinAStep) {
  constexpr int64_t kK = 96, kN = 40;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> dense(kK * kN);
  for (float& value : dense) value = normal(random);
  const auto read = [&](int64_t begin, int64_t end, float* to) {
    std::copy(dense.begin() + begin * kK, dense.begin() + end * kK, to);
    return absl::OkStatus();
  };
  for (const int bits : {2, 3, 4, 8}) {
    for (const int64_t group_size : {32, -1}) {
      const auto weight = Rtn(kK, kN, {.bits = bits, .group_size = group_size}, DType::kBf16, read);
      ASSERT_TRUE(weight.ok()) << weight.status();
      ASSERT_TRUE(Validate(*weight).ok()) << Validate(*weight);
      int far = 0;
      for (int64_t k = 0; k < kK; ++k) {
        for (int64_t n = 0; n < kN; ++n) {
          const float scale = weight->Scale(k / weight->group_rows(), n);
          const float error = std::fabs(WeightValue(*weight, k, n) - dense[n * kK + k]);
          // Half a step, half of one for the rounding of z, and 2^-9 of all steps for the rounding
          // of s.
          const float limit = scale * (1.0f + std::ldexp(1.0f, bits - 8));
          far += error > limit ? 1 : 0;
        }
      }
      EXPECT_EQ(far, 0) << bits;
    }
  }
}

TEST(Rtn, RefusesWhatIsNoNumber) {
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(), 1e9f}) {
    const auto read = [&](int64_t begin, int64_t end, float* to) {
      for (int64_t i = 0; i < (end - begin) * 8; ++i) to[i] = begin * 8 + i == 19 ? bad : 1.0f;
      return absl::OkStatus();
    };
    const auto weight = Rtn(8, 4, {.bits = 4, .group_size = 4}, DType::kFp16, read);
    const std::string message(weight.status().message());
    EXPECT_THAT(message, HasSubstr("weight: got "));
    EXPECT_THAT(message, HasSubstr(std::isfinite(bad) ? "a group at [2, 0]" : "at [2, 3]"));
  }
}

}  // namespace
}  // namespace awqd::tools
