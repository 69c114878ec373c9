// Products of FP16 and BF16 activations as INT16, of few tokens by columns and from 10 to 48 tokens
// on from packed panels (kernels/cpu/bodies/integers): what is exact, how far off the rest may be,
// which tokens are left to FP32.
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/device.h"
#include "kernels/exact.h"
#include "tests/kernels/cpu_product.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

class CpuIntegers : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    if (DetectIsa() < CpuIsa::kNeonDot) {
      GTEST_SKIP() << "needs AVX2, or NEON with dot products, allowed by AWQD_CPU_ISA";
    }
  }

  static HostWeight Weight(const char* scheme, int64_t k, int64_t n) {
    testing::WeightSpec spec;
    spec.k = k;
    spec.n = n;
    spec.scheme = ParseScheme(scheme).value();
    return testing::RandomWeight(spec);
  }

  // Multiplies FP16 elements in FP32, which is never made integers.
  std::vector<float> InFloats(const DeviceWeight& weight, const std::vector<uint8_t>& halves,
                              int64_t m) {
    std::vector<uint8_t> x(halves.size() * 2);
    for (size_t i = 0; i < halves.size() / 2; ++i) {
      const auto index = static_cast<int64_t>(i);
      StoreElement(x.data(), DType::kFp32, index, LoadElement(halves.data(), DType::kFp16, index));
    }
    return Product(weight, *device_, x, 0, m, DType::kFp32);
  }

  const std::shared_ptr<Device> device_ = OpenCpuDevice();
};

// Integers of 11 bits beside small ones, weights without scales, sums below 2^24.
TEST_P(CpuIntegers, ValuesOfFifteenBitsAreExact) {
  for (const char* scheme : {"w4g128z+1", "w4cz+1", "w8cz+1", "w8g256z+1"}) {
    const int64_t k = 520, n = 40, m = GetParam();
    const HostWeight w = Weight(scheme, k, n);
    const auto weight = PrepareWeight(w, *device_).value();
    std::vector<uint8_t> x(m * k * 2);
    for (int64_t i = 0; i < m * k; ++i) {
      const int64_t large = i * 7919 % 4095 - 2047, small = i * 31 % 25 - 12;
      StoreElement(x.data(), DType::kFp16, i, static_cast<float>(i % 13 == 0 ? large : small));
    }
    const std::vector<float> y = Product(*weight, *device_, x, 0, m);
    for (int64_t i = 0; i < m * n; ++i) {
      double want = 0;
      for (int64_t row = 0; row < k; ++row) {
        const double value = LoadElement(x.data(), DType::kFp16, i / n * k + row);
        want += value * WeightValue(w, row, i % n);
      }
      ASSERT_EQ(y[i], want) << scheme << " token " << i / n << " column " << i % n;
    }
  }
}

// Each element differs by at most half a step, 2^-15 of its block's largest.
TEST_P(CpuIntegers, OthersAreRoundedToTheStepOfTheirBlock) {
  for (const char* scheme : {"w4g128z", "w4g384s", "w8g128z+bf16", "w4cr", "w8co", "w4g128s*c",
                             "w4g16z", "w2g64o", "w3g32r+fp32", "w1g128z"}) {
    const int64_t k = 1000, n = 71, m = GetParam();
    const HostWeight w = Weight(scheme, k, n);
    const auto weight = PrepareWeight(w, *device_).value();
    const std::vector<uint8_t> x = testing::RandomMatrix(m, k, DType::kFp16, 5);
    const std::vector<float> y = Product(*weight, *device_, x, 0, m);
    for (int64_t t = 0; t < m; ++t) {
      for (int64_t c = 0; c < n; ++c) {
        double want = 0, off = 0;
        for (int64_t block = 0; block < k; block += 128) {
          // `size`: the size of sums before zeros are subtracted, which FP32 rounds; a code is 255
          // at most.
          double greatest = 0, weights = 0, size = 0;
          for (int64_t row = block; row < std::min(block + 128, k); ++row) {
            const double v = LoadElement(x.data(), DType::kFp16, t * k + row);
            const double weight_value = double{WeightValue(w, row, c)};
            want += v * weight_value;
            greatest = std::max(greatest, std::fabs(v));
            weights += std::fabs(weight_value);
            size += std::fabs(v) *
                    std::fabs(w.Scale(row / w.shape().group_rows(), c) * w.Outer(c)) * 300;
          }
          off += greatest * 0x1p-15 * weights + size * 0x1p-22;
        }
        ASSERT_NEAR(y[t * n + c], want, off) << scheme << " token " << t << " column " << c;
      }
    }
  }
}

// A value that dwarfs the others of its block would leave them few bits, and a column may not
// multiply it at all.
TEST_P(CpuIntegers, TokensThatInt16HoldsBadlyAreMultipliedInFloats) {
  const int64_t k = 640, n = 40, m = GetParam();
  const HostWeight w = Weight("w4g128z", k, n);
  const auto weight = PrepareWeight(w, *device_).value();
  const std::vector<uint8_t> plain = testing::RandomMatrix(m, k, DType::kFp16, 6);
  const std::vector<float> clean = Product(*weight, *device_, plain, 0, m);
  const std::vector<float> floats = InFloats(*weight, plain, m);
  ASSERT_NE(clean, floats);
  for (const float wild : {60000.0f, -1000.0f, HUGE_VALF}) {
    std::vector<uint8_t> x = plain;
    for (const int64_t token : {int64_t{0}, int64_t{4}, int64_t{5}, m - 1}) {
      if (token < m) StoreElement(x.data(), DType::kFp16, token * k + 300 + token % 11, wild);
    }
    const std::vector<float> y = Product(*weight, *device_, x, 0, m);
    const std::vector<float> want = InFloats(*weight, x, m);
    for (int64_t i = 0; i < m * n; ++i) {
      const int64_t token = i / n;
      const bool left = token == 0 || token == 4 || token == 5 || token == m - 1;
      const float expected = left ? want[i] : clean[i];
      ASSERT_TRUE(y[i] == expected || (std::isnan(y[i]) && std::isnan(expected)))
          << wild << " token " << token << ": " << y[i] << ", expected " << expected;
    }
  }
}

// All zeros, and the smallest numbers of FP16.
TEST_P(CpuIntegers, NothingAndTheSmallest) {
  const int64_t k = 256, n = 24, m = GetParam();
  const HostWeight w = Weight("w4g128z+1", k, n);
  const auto weight = PrepareWeight(w, *device_).value();
  std::vector<uint8_t> x(m * k * 2);
  for (int64_t i = 0; i < 128; ++i) StoreElement(x.data(), DType::kFp16, k + i, 0x1p-24f);
  const std::vector<float> y = Product(*weight, *device_, x, 0, m);
  for (int64_t c = 0; c < n; ++c) {
    double sum = 0;
    for (int64_t row = 0; row < 128; ++row) sum += WeightValue(w, row, c);
    EXPECT_EQ(y[c], 0);
    EXPECT_EQ(y[n + c], sum * 0x1p-24) << "column " << c;
    EXPECT_EQ(y[(m - 1) * n + c], 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Tokens, CpuIntegers, ::testing::Values(3, 9, 17, 50, 200),
                         [](const auto& info) { return absl::StrCat(info.param); });

}  // namespace
}  // namespace awqd
