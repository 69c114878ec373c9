// Activations that are rounded to E4M3: rows that multiply them in 8 bits and rows that multiply the
// rounded numbers, against the definition of kernels/steps.h in double.
#include "kernels/base/float8.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/conformance/cases.h"
#include "tests/conformance/float8_oracle.h"
#include "tests/testing/matchers.h"

namespace awqd::testing {
namespace {

using enum ActivationQuantization;

TEST(Float8Test, RoundsToTheNearest) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = E4m3ToFloat(static_cast<uint8_t>(code));
    const float high = E4m3ToFloat(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    for (float value : {low, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, high)}) {
      EXPECT_EQ(E4m3ToFloat(FloatToE4m3(value)), NearestE4m3(value)) << value;
      EXPECT_EQ(E4m3ToFloat(FloatToE4m3(-value)), -NearestE4m3(value)) << value;
    }
  }
  EXPECT_EQ(FloatToE4m3(464), 0x7e);
  EXPECT_EQ(FloatToE4m3(-std::numeric_limits<float>::infinity()), 0xfe);
  EXPECT_EQ(FloatToE4m3(std::numeric_limits<float>::quiet_NaN()) & 0x7f, 0x7f);
}

class Float8Conformance : public Conformance {
 protected:
  std::vector<int64_t> Counts() const {
    std::vector<int64_t> out;
    for (int64_t m : {1, 7, 33, 64, 130, 200, 300}) {
      if (m <= shape().max_m && Serves(row(), m)) out.push_back(m);
    }
    return out;
  }
};

TEST_P(Float8Conformance, MatchesTheDefinition) {
  const HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, true, 51);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Bench bench(row(), prepared_);
  for (DType in : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    if ((row().inputs & MaskOf(in)) == 0) continue;
    const std::vector<uint8_t> x = RandomMatrix(shape().max_m, weight.k, in, 52);
    for (ActivationQuantization how : {kFloat8PerToken, kFloat8PerBlock, kFloat8Static}) {
      for (int64_t m : Counts()) {
        Quantized quantized = {.how = how, .scales = {}};
        if (how == kFloat8Static) quantized.scales.assign(m, 0.01f);
        const Product product = bench.Run(x, in, DType::kFp32, m, m == 33 ? 3 : 1,
                                          ActivationFunction::kNone, quantized);
        EXPECT_EQ(product.ran, &row());
        const std::vector<double> want = ProductOfStaged(
            weight, RoundToE4m3(weight, x, in, m, quantized), ActivationFunction::kNone);
        EXPECT_LE(FrobeniusError(product.y, DType::kFp32, want),
                  Float8Tolerance(row(), DType::kFp32, in))
            << Name(in) << " M " << m << " how " << static_cast<int>(how);
      }
    }
  }
}

// E4M3 of the caller, with a scale for each token or for each block.
TEST_P(Float8Conformance, WhatTheCallerHasRounded) {
  const HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, true, 57);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  if ((row().inputs & MaskOf(DType::kFp32)) == 0) GTEST_SKIP() << "takes no FP32";
  Bench bench(row(), prepared_);
  constexpr int64_t kBlock = 128;
  for (ActivationQuantization how : {kFloat8Static, kFloat8PerBlock}) {
    const int64_t step = how == kFloat8PerBlock ? kBlock : weight.k;
    for (int64_t m : Counts()) {
      std::mt19937 random(static_cast<uint32_t>(m));
      Quantized quantized = {.how = how, .scales = {}};
      std::vector<uint8_t> codes;
      std::vector<float> numbers;
      for (int64_t i = 0; i < m * weight.k; ++i) {
        if (i % weight.k % step == 0) {
          quantized.scales.push_back(0.001f * static_cast<float>(1 + random() % 50));
        }
        codes.push_back(static_cast<uint8_t>(random() % 0x7f | random() % 2 << 7));
        numbers.push_back(E4m3ToFloat(codes.back()) * quantized.scales.back());
      }
      const Product product =
          bench.Run(codes, DType::kE4m3, DType::kFp32, m, 1, ActivationFunction::kNone, quantized);
      EXPECT_EQ(product.ran, &row());
      EXPECT_LE(FrobeniusError(product.y, DType::kFp32,
                               ProductOfStaged(weight, numbers, ActivationFunction::kNone)),
                Float8Tolerance(row(), DType::kFp32, DType::kFp32))
          << "M " << m << " how " << static_cast<int>(how);
    }
  }
}

TEST_P(Float8Conformance, ATokenHasTheSameBitsInEveryBatch) {
  if (!row().batch_invariant) GTEST_SKIP() << "its sums depend on the batch";
  const HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 58);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Bench bench(row(), prepared_);
  const std::vector<int64_t> counts = Counts();
  const int64_t most = counts.empty() ? 0 : counts.back();
  const std::vector<uint8_t> x = RandomMatrix(most, weight.k, DType::kFp16, 59);
  for (ActivationQuantization how : {kFloat8PerToken, kFloat8PerBlock}) {
    const auto run = [&](int64_t m) {  // the last m tokens, which so move to other positions
      const std::vector<uint8_t> last(x.end() - m * weight.k * 2, x.end());
      return bench.Run(last, DType::kFp16, DType::kFp32, m, 1, ActivationFunction::kNone, {how, {}})
          .y;
    };
    const std::vector<uint8_t> all = run(most);
    for (int64_t m : counts) {
      EXPECT_EQ(FirstDifference(run(m), {all.end() - m * weight.n * 4, all.end()}), -1)
          << "M " << m << " of " << most << " how " << static_cast<int>(how);
    }
  }
}

TEST_P(Float8Conformance, OrderFactorTransformAndActivationFunction) {
  if (shape().max_m > 64) GTEST_SKIP() << "a smaller shape shows it";
  for (const auto& [order, factor, transform] :
       {std::tuple{true, false, false}, {true, true, false}, {false, false, true}}) {
    const HostWeight weight = RandomWeight({.k = shape().k,
                                            .n = shape().n,
                                            .scheme = ParseScheme(shape().scheme).value(),
                                            .bias = true,
                                            .order = order,
                                            .factor = factor,
                                            .hadamard = transform ? shape().k & -shape().k : 0,
                                            .seed = 53});
    if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
    Bench bench(row(), prepared_);
    const int64_t rows = Counts().empty() ? 0 : Counts().back();
    for (DType in : {DType::kFp16, DType::kFp32}) {
      if ((row().inputs & MaskOf(in)) == 0 || rows == 0) continue;
      const std::vector<uint8_t> x = RandomMatrix(rows, weight.k, in, 54);
      for (ActivationQuantization how : {kFloat8PerToken, kFloat8PerBlock}) {
        const Product product =
            bench.Run(x, in, DType::kFp16, rows, 1, ActivationFunction::kSilu, {.how = how});
        const std::vector<double> want = ProductOfStaged(
            weight, RoundToE4m3(weight, x, in, rows, {.how = how}), ActivationFunction::kSilu);
        EXPECT_LE(FrobeniusError(product.y, DType::kFp16, want), ProductTolerance(DType::kFp16, in))
            << "order " << order << " factor " << factor << " transform " << transform;
      }
    }
  }
}

// A token of zeros gives its bias; a token with a NaN or an infinity gives NaN, and its neighbours
// do not change.
TEST_P(Float8Conformance, OddTokens) {
  const HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 55);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  if ((row().inputs & MaskOf(DType::kFp32)) == 0) GTEST_SKIP() << "takes no FP32";
  const int64_t rows = std::max<int64_t>(4, row().min_m);
  if (!Serves(row(), rows)) GTEST_SKIP() << "takes fewer tokens";
  std::vector<uint8_t> x = RandomMatrix(rows, weight.k, DType::kFp32, 56);
  std::fill(x.begin(), x.begin() + weight.k * 4, 0);
  SetElement(&x, DType::kFp32, weight.k + 3, std::numeric_limits<float>::quiet_NaN());
  SetElement(&x, DType::kFp32, 2 * weight.k + 5, -std::numeric_limits<float>::infinity());
  for (ActivationQuantization how : {kFloat8PerToken, kFloat8PerBlock, kFloat8Static}) {
    const std::vector<float> scales(how == kFloat8Static ? rows : 0, 0.5f);
    const Product product =
        Bench(row(), prepared_)
            .Run(x, DType::kFp32, DType::kFp32, rows, 1, ActivationFunction::kNone, {how, scales});
    for (int64_t n = 0; n < weight.n; ++n) {
      EXPECT_EQ(GetElement(product.y, DType::kFp32, n), 0);
      EXPECT_TRUE(std::isnan(GetElement(product.y, DType::kFp32, weight.n + n)));
      EXPECT_TRUE(std::isnan(GetElement(product.y, DType::kFp32, 2 * weight.n + n)));
      EXPECT_TRUE(std::isfinite(GetElement(product.y, DType::kFp32, 3 * weight.n + n)));
    }
  }
}

std::vector<const KernelRow*> Float8Rows() {
  std::vector<const KernelRow*> out = RowsOf(Op::kMatmul);
  for (const KernelRow* row : RowsOf(Op::kFloat8Activations)) out.push_back(row);
  return out;
}

INSTANTIATE_TEST_SUITE_P(Rows, Float8Conformance,
                         ::testing::Combine(::testing::ValuesIn(Float8Rows()),
                                            ::testing::ValuesIn(Float8Shapes())),
                         ParamName);

}  // namespace
}  // namespace awqd::testing
