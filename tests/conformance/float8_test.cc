// Activations that are rounded to E4M3: rows that multiply them in 8 bits and rows that multiply the
// rounded numbers, against the definition of kernels/steps.h in double.
#include "kernels/base/float8.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/reference.h"
#include "kernels/exact.h"
#include "tests/conformance/cases.h"
#include "tests/testing/matchers.h"

namespace awqd::testing {
namespace {

using enum ActivationQuantization;

constexpr int64_t kBlock = 128;

// The nearest E4M3, found among all; of two the one with an even code.
float Nearest(float value) {
  float best = 0;
  bool even = true;
  for (int code = 0; code < 0x7f; ++code) {
    const float magnitude = E4m3ToFloat(static_cast<uint8_t>(code));
    const double here = std::abs(static_cast<double>(magnitude) - std::abs(value));
    const double there = std::abs(static_cast<double>(best) - std::abs(value));
    if (here < there || (here == there && !even)) best = magnitude, even = code % 2 == 0;
  }
  return std::copysign(best, value);
}

TEST(Float8Test, RoundsToTheNearest) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = E4m3ToFloat(static_cast<uint8_t>(code));
    const float high = E4m3ToFloat(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    for (float value : {low, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, high)}) {
      EXPECT_EQ(E4m3ToFloat(FloatToE4m3(value)), Nearest(value)) << value;
      EXPECT_EQ(E4m3ToFloat(FloatToE4m3(-value)), -Nearest(value)) << value;
    }
  }
  EXPECT_EQ(FloatToE4m3(464), 0x7e);
  EXPECT_EQ(FloatToE4m3(-std::numeric_limits<float>::infinity()), 0xfe);
  EXPECT_EQ(FloatToE4m3(std::numeric_limits<float>::quiet_NaN()) & 0x7f, 0x7f);
}

// x' of a token: times the factor, transformed, by stored rows.
std::vector<float> Staged(const HostWeight& weight, const std::vector<uint8_t>& x, DType dtype,
                          int64_t m) {
  std::vector<float> by_feature(weight.k), out(weight.k);
  for (int64_t k = 0; k < weight.k; ++k) {
    by_feature[k] = GetElement(x, dtype, m * weight.k + k);
    if (!weight.factor.empty()) by_feature[k] *= weight.factor[k];
  }
  for (int64_t k = 0; k < weight.k && weight.hadamard.size > 0; k += weight.hadamard.size) {
    TransformBlock(weight.hadamard, by_feature.data() + k);
  }
  for (int64_t i = 0; i < weight.k; ++i) {
    out[i] = by_feature[weight.order.empty() ? i : weight.order[i]];
  }
  return out;
}

std::vector<float> Rounded(const HostWeight& weight, const std::vector<uint8_t>& x, DType dtype,
                           int64_t rows, const Quantized& how) {
  std::vector<float> out;
  for (int64_t m = 0; m < rows; ++m) {
    const std::vector<float> token = Staged(weight, x, dtype, m);
    const int64_t step = how.how == kFloat8PerBlock ? kBlock : weight.k;
    for (int64_t begin = 0; begin < weight.k; begin += step) {
      const int64_t end = std::min(begin + step, weight.k);
      float scale = 0;
      for (int64_t i = begin; i < end; ++i) scale = std::max(scale, std::abs(token[i]));
      scale = how.scales.empty() ? scale / 448 : how.scales[m];
      if (scale == 0) scale = 1;
      for (int64_t i = begin; i < end; ++i) out.push_back(Nearest(token[i] / scale) * scale);
    }
  }
  return out;
}

// The product of numbers that stand as the weight's stored rows do.
std::vector<double> Definition(HostWeight weight, const std::vector<float>& x,
                               ActivationFunction activation) {
  weight.order.clear();
  weight.factor.clear();
  weight.hadamard = {};
  const int64_t rows = static_cast<int64_t>(x.size()) / weight.k;
  return ReferenceProduct(weight, {.x = {x.data(), DType::kFp32, rows, weight.k},
                                   .bias = weight.bias.empty() ? nullptr : weight.bias.data(),
                                   .activation = activation});
}

// E4M3 tensor cores keep some 14 bits of the sums of a step: up to 2.2e-4 was seen (H200).
double Tolerance(const KernelRow& row, DType out, DType in) {
  return row.op == Op::kFloat8Activations && out == DType::kFp32 ? 3e-4 : ProductTolerance(out, in);
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
        const std::vector<double> want =
            Definition(weight, Rounded(weight, x, in, m, quantized), ActivationFunction::kNone);
        EXPECT_LE(FrobeniusError(product.y, DType::kFp32, want), Tolerance(row(), DType::kFp32, in))
            << Name(in) << " M " << m << " how " << static_cast<int>(how);
      }
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
        const std::vector<double> want = Definition(
            weight, Rounded(weight, x, in, rows, {.how = how}), ActivationFunction::kSilu);
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
