// Every matmul row x schemes x shapes x counts of tokens against the oracle in double.
//
// Rows that the device or the shape excludes are reported as skipped, with name and reason.
// Environment: AWQD_TEST_DEVICE, AWQD_TEST_FULL=1 (more shapes and token counts).
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/reference.h"
#include "kernels/exact.h"
#include "tests/conformance/cases.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"

namespace awqd::testing {
namespace {

class MatmulConformance : public Conformance {};

std::vector<double> FirstRows(const std::vector<double>& all, int64_t count) {
  return {all.begin(), all.begin() + count};
}

TEST_P(MatmulConformance, AgreesWithTheOracle) {
  const HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, shape().n % 16 == 0, 7);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Bench bench(row(), prepared_);
  for (DType in : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    if ((row().inputs & MaskOf(in)) == 0) continue;
    const int64_t max_m = in == DType::kFp16 ? shape().max_m : std::min<int64_t>(shape().max_m, 33);
    const std::vector<uint8_t> x = RandomMatrix(max_m, weight.k, in, 11);
    const std::vector<double> want =
        ReferenceProduct(weight, {.x = {x.data(), in, max_m, weight.k},
                                  .bias = weight.bias.empty() ? nullptr : weight.bias.data()});
    for (DType out : {DType::kFp16, DType::kBf16, DType::kFp32}) {
      if ((row().outputs & MaskOf(out)) == 0) continue;
      for (int64_t m : TokenCounts(in == out ? max_m : std::min<int64_t>(max_m, 17))) {
        if (!Serves(row(), m)) continue;
        const Product product = bench.Run(x, in, out, m, m == 5 || m == 33 ? 10 : 1);
        EXPECT_EQ(product.ran, &row());
        EXPECT_LE(FrobeniusError(product.y, out, FirstRows(want, m * weight.n)),
                  ProductTolerance(out, in))
            << "M " << m << " " << Name(in) << " -> " << Name(out);
      }
    }
  }
}

TEST_P(MatmulConformance, ABadRowSpoilsOnlyItself) {
  const HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 8);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Bench bench(row(), prepared_);
  for (int64_t m : {3, 9, 33}) {
    if (!Serves(row(), m) || m > shape().max_m) continue;
    std::vector<uint8_t> x = RandomMatrix(m, weight.k, DType::kFp16, 12);
    const Product clean = bench.Run(x, DType::kFp16, DType::kFp32, m);
    const int64_t bad = m / 2;
    SetElement(&x, DType::kFp16, bad * weight.k, std::numeric_limits<float>::quiet_NaN());
    SetElement(&x, DType::kFp16, bad * weight.k + weight.k / 2,
               std::numeric_limits<float>::infinity());
    const Product spoiled = bench.Run(x, DType::kFp16, DType::kFp32, m);
    for (int64_t i = 0; i < m * weight.n; ++i) {
      const float got = GetElement(spoiled.y, DType::kFp32, i);
      if (i / weight.n == bad) {
        EXPECT_FALSE(std::isfinite(got)) << "row " << bad << " column " << i % weight.n;
      } else {
        ASSERT_EQ(got, GetElement(clean.y, DType::kFp32, i)) << "row " << i / weight.n;
      }
    }
  }
}

// All weights are 1: partial sums rise far above 65504 and return.
TEST_P(MatmulConformance, PartialSumsMayPassTheRangeOfHalf) {
  HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 9);
  const QuantizationScheme& d = weight.scheme;
  if (weight.k < 64 || d.scale_dtype != DType::kFp16 || d.outer != OuterKind::kNone) {
    GTEST_SKIP() << "K too small, or other scales";
  }
  if (d.zero_kind != ZeroKind::kStored || !d.is_integer()) GTEST_SKIP() << "no stored zeros";
  for (uint8_t& scale : weight.scales) scale = 0;
  for (size_t i = 1; i < weight.scales.size(); i += 2) weight.scales[i] = 0x3c;
  for (uint8_t& code : weight.codes) code = 0;
  std::fill(weight.zeros.begin(), weight.zeros.end(), 1);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  const int64_t m = std::max<int64_t>(row().min_m, 1);
  std::vector<uint8_t> x(m * weight.k * 2);
  for (int64_t i = 0; i < m * weight.k; ++i) {
    const int64_t k = i % weight.k;
    SetElement(&x, DType::kFp16, i, k < weight.k / 2 ? -30000.0f : 30000.0f);
    if (k + 1 < weight.k) continue;
    SetElement(&x, DType::kFp16, i, weight.k % 2 == 0 ? 29984.0f : 16.0f);
  }
  const std::vector<double> want =
      ReferenceProduct(weight, {.x = {x.data(), DType::kFp16, m, weight.k}});
  const Product product = Bench(row(), prepared_).Run(x, DType::kFp16, DType::kFp16, m);
  for (int64_t i = 0; i < m * weight.n; ++i) {
    EXPECT_EQ(GetElement(product.y, DType::kFp16, i), want[i]) << "column " << i % weight.n;
  }
}

// Weights of -4608 as 14 less 15. The padding of K must not be a code that these scales turn into
// an infinity, because zeros of the activations would turn it into a NaN.
TEST_P(MatmulConformance, PaddingIsZeroWhateverTheScale) {
  HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 17);
  const QuantizationScheme& d = weight.scheme;
  if (d.zero_kind != ZeroKind::kStored || !d.is_integer() || d.scale_dtype != DType::kFp16 ||
      d.outer != OuterKind::kNone) {
    GTEST_SKIP() << "no stored zeros, or other scales";
  }
  const int most = (1 << d.bits) - 1;
  int byte = 0;
  for (int bit = 0; bit < 8; bit += weight.code_bits()) byte |= (most - 1) << bit;
  std::fill(weight.codes.begin(), weight.codes.end(), static_cast<uint8_t>(byte));
  std::fill(weight.zeros.begin(), weight.zeros.end(), static_cast<uint8_t>(most));
  for (size_t i = 0; i < weight.scales.size(); ++i) weight.scales[i] = i % 2 == 0 ? 0x80 : 0x6c;
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  const int64_t m = std::max<int64_t>(row().min_m, 1);
  std::vector<uint8_t> x(m * weight.k * 2);
  for (int64_t i = 0; i < m * weight.k; ++i) SetElement(&x, DType::kFp16, i, 0.125f);
  const Product product = Bench(row(), prepared_).Run(x, DType::kFp16, DType::kFp32, m);
  for (int64_t i = 0; i < m * weight.n; ++i) {
    ASSERT_EQ(GetElement(product.y, DType::kFp32, i), -576.0 * weight.k) << "element " << i;
  }
}

// Weights that FP16 cannot hold.
TEST_P(MatmulConformance, LargeScalesTimesFp32Activations) {
  const HostWeight weight = MakeWeight(shape(), Scales::kLarge, false, 23);
  const QuantizationScheme& d = weight.scheme;
  if (d.scale_dtype != DType::kFp16 || !d.is_integer()) GTEST_SKIP() << "other scales";
  if ((row().inputs & MaskOf(DType::kFp32)) == 0) GTEST_SKIP() << "takes no FP32";
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  // Some tokens, because the error of a single number, which may be a small sum of large ones, says
  // little.
  int64_t m = std::max<int64_t>(row().min_m, 8);
  if (row().max_m >= 0) m = std::min(m, row().max_m);
  const std::vector<uint8_t> x = RandomMatrix(m, weight.k, DType::kFp32, 24);
  const std::vector<double> want =
      ReferenceProduct(weight, {.x = {x.data(), DType::kFp32, m, weight.k}});
  const Product product = Bench(row(), prepared_).Run(x, DType::kFp32, DType::kFp32, m);
  EXPECT_LE(FrobeniusError(product.y, DType::kFp32, want),
            ProductTolerance(DType::kFp32, DType::kFp32));
}

// All weights are 1: partial sums exceed the range of FP32 and return.
TEST_P(MatmulConformance, PartialSumsMayPassTheRangeOfFloat) {
  HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 9);
  const QuantizationScheme& d = weight.scheme;
  if (d.scale_dtype != DType::kFp16 || d.outer != OuterKind::kNone || !d.is_integer() ||
      d.zero_kind != ZeroKind::kStored || weight.k < 4) {
    GTEST_SKIP() << "no stored zeros, other scales, or K too small";
  }
  if ((row().inputs & MaskOf(DType::kFp32)) == 0) GTEST_SKIP() << "takes no FP32";
  for (size_t i = 0; i < weight.scales.size(); ++i) weight.scales[i] = i % 2 == 0 ? 0 : 0x3c;
  std::fill(weight.codes.begin(), weight.codes.end(), uint8_t{0});
  std::fill(weight.zeros.begin(), weight.zeros.end(), uint8_t{1});
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  const int64_t m = std::max<int64_t>(row().min_m, 1), half = weight.k / 2;
  std::vector<uint8_t> x(m * weight.k * 4);
  for (int64_t i = 0; i < m * weight.k; ++i) {
    const int64_t k = i % weight.k;
    SetElement(&x, DType::kFp32, i, k < half ? 0x1p127f : k < 2 * half ? -0x1p127f : 0.0f);
  }
  // The last of them subtracts a quarter less than the first adds.
  for (int64_t row = 1; row <= m; ++row) {
    SetElement(&x, DType::kFp32, (row - 1) * weight.k + 2 * half - 1, -0x1.8p126f);
  }
  const Product product = Bench(row(), prepared_).Run(x, DType::kFp32, DType::kFp32, m);
  for (int64_t i = 0; i < m * weight.n; ++i) {
    ASSERT_EQ(GetElement(product.y, DType::kFp32, i), -0x1p125f) << "element " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, MatmulConformance,
                         ::testing::Combine(::testing::ValuesIn(RowsOf(Op::kMatmul)),
                                            ::testing::ValuesIn(Shapes())),
                         ParamName);
}  // namespace
}  // namespace awqd::testing
