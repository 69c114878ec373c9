// Every row of quantised activations against the definition, in double, of the same INT8 numbers
// and scales: schemes, counts of tokens, stage and finish, batches, and stage's results for
// floating activations.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
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

constexpr int64_t kMostTokens = 33;
// Sums of integers are exact; sums of groups, scales and the bias are FP32.
constexpr double kTolerance = 1e-6;

struct Tokens {
  std::vector<int8_t> q;
  std::vector<float> scales;

  std::vector<uint8_t> Bytes() const { return {q.begin(), q.end()}; }
};

Tokens RandomTokens(int64_t rows, int64_t k, uint64_t seed) {
  const std::vector<uint8_t> bytes = RandomMatrix(rows, k, DType::kInt8, seed);
  Tokens out = {.q = {bytes.begin(), bytes.end()}, .scales = {}};
  for (int64_t m = 0; m < rows; ++m) {
    out.scales.push_back(0.01f + 0.003f * static_cast<float>(m % 7));
  }
  return out;
}

// The expected result of stage, computed in another way: x' in FP32, its scale, and the nearest
// integers by the C library.
Tokens Quantise(const HostWeight& weight, const std::vector<uint8_t>& x, DType dtype, int64_t rows,
                std::optional<float> given) {
  Tokens out;
  for (int64_t m = 0; m < rows; ++m) {
    std::vector<float> token;
    float largest = 0;
    for (int64_t k = 0; k < weight.k; ++k) {
      const float value = GetElement(x, dtype, m * weight.k + k);
      token.push_back(weight.factor.empty() ? value : value * weight.factor[k]);
    }
    for (int64_t k = 0; k < weight.k && weight.hadamard.size > 0; k += weight.hadamard.size) {
      TransformBlock(weight.hadamard, token.data() + k);
    }
    for (const float value : token) largest = std::max(largest, std::abs(value));
    const float scale = given ? *given : largest == 0 ? 1 : largest / 127;
    for (float value : token) {
      const float rounded = std::nearbyint(value / scale);
      out.q.push_back(static_cast<int8_t>(std::clamp(rounded, given ? -128.0f : -127.0f, 127.0f)));
    }
    out.scales.push_back(scale);
  }
  return out;
}

std::vector<double> Definition(const HostWeight& weight, const Tokens& tokens, int64_t rows,
                               ActivationFunction activation = ActivationFunction::kNone) {
  return ReferenceProduct(weight, {.q = tokens.q.data(),
                                   .scale = tokens.scales.data(),
                                   .tokens = rows,
                                   .bias = weight.bias.empty() ? nullptr : weight.bias.data(),
                                   .activation = activation});
}

class QuantizedConformance : public Conformance {};

TEST_P(QuantizedConformance, MatchesTheDefinition) {
  const HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, true, 31);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Bench bench(row(), prepared_);
  const Tokens tokens = RandomTokens(shape().max_m, weight.k, 32);
  const std::vector<double> want = Definition(weight, tokens, shape().max_m);
  for (int64_t m : {0, 1, 2, 7, 33, 64, 130, 200, 300}) {
    if (m > shape().max_m || !Serves(row(), m)) continue;
    const Quantized scales = {
        .scales = {tokens.scales.begin(), tokens.scales.begin() + m + (m == 0)}};
    const Product product = bench.Run(tokens.Bytes(), DType::kInt8, DType::kFp32, m, m == 7 ? 3 : 1,
                                      ActivationFunction::kNone, scales);
    EXPECT_EQ(product.ran, &row());
    EXPECT_LE(FrobeniusError(product.y, DType::kFp32, {want.begin(), want.begin() + m * weight.n}),
              kTolerance)
        << "M " << m;
  }
}

TEST_P(QuantizedConformance, ATokenHasTheSameBitsInEveryBatch) {
  if (!row().batch_invariant) GTEST_SKIP() << "the row does not say so";
  const HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, true, 33);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Bench bench(row(), prepared_);
  const std::vector<uint8_t> x = RandomMatrix(kMostTokens, weight.k, DType::kFp16, 34);
  const Quantized per_token = {.how = ActivationQuantization::kPerToken};
  const auto run = [&](const std::vector<uint8_t>& of, int64_t m) {
    return bench.Run(of, DType::kFp16, DType::kFp32, m, 1, ActivationFunction::kNone, per_token).y;
  };
  const std::vector<uint8_t> all = run(x, kMostTokens);
  for (int64_t m : {1, 2, 5, 7, 19}) {
    const int64_t begin = kMostTokens - m;
    EXPECT_EQ(FirstDifference(run({x.begin() + begin * weight.k * 2, x.end()}, m),
                              {all.begin() + begin * weight.n * 4, all.end()}),
              -1)
        << "M " << m;
  }
}

// Widths x blocks x zeros x scales, K and N that fill no unit, a bias everywhere.
std::vector<Shape> QuantizedShapes() {
  static std::deque<std::string> names;
  std::vector<Shape> out;
  for (int bits = 1; bits <= 8; ++bits) {
    for (const char* block : {"g32", "g64", "g128", "g72", "c", "t"}) {
      for (const char* zero : {"s", "m3", "z", "r", "o:fp32"}) {
        for (const char* scale : {"", "+bf16*t", "+fp32", "+int8*c", "+1*c"}) {
          names.push_back(absl::StrCat("w", bits, block, zero, scale));
          out.push_back({200, 43, names.back().c_str(), kMostTokens});
        }
      }
    }
  }
  // Pieces of groups, many tiles, several passes of tokens, blocks of columns.
  for (const Shape& more : std::initializer_list<Shape>{{4200, 24, "w8cz", 33},
                                                        {4200, 24, "w4cr", 33},
                                                        {4200, 40, "w8g128z+int8*c", 33},
                                                        {3000, 40, "w4g1024o", 33},
                                                        {2100, 19, "w8g600z+fp32", 33},
                                                        {1024, 136, "w4g128z", 300},
                                                        {1152, 72, "w4g384z+int8*c", 130},
                                                        {1000, 330, "w4cs+bf16", 64},
                                                        {4096, 72, "w8cs", 130},
                                                        {512, 136, "w8g128s", 130},
                                                        {130, 72, "w4g10s", 33},
                                                        {60, 24, "w8b12x0z+e8m0", 33},
                                                        {130, 40, "w4b32x16z+e4m3", 33}}) {
    out.push_back(more);
  }
  return out;
}

// --- Stage and finish ---

class QuantizedStage : public Conformance {};

TEST_P(QuantizedStage, OrderFactorAndActivationFunction) {
  for (const auto& [order, factor, transform] : {std::tuple{false, false, false},
                                                 {true, false, false},
                                                 {true, true, false},
                                                 {false, false, true},
                                                 {true, true, true}}) {
    const HostWeight weight = RandomWeight({.k = shape().k,
                                            .n = shape().n,
                                            .scheme = ParseScheme(shape().scheme).value(),
                                            .bias = true,
                                            .order = order,
                                            .factor = factor,
                                            .hadamard = transform ? shape().k & -shape().k : 0,
                                            .seed = 35});
    if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
    Bench bench(row(), prepared_);
    for (DType in : {DType::kFp16, DType::kBf16, DType::kFp32}) {
      const std::vector<uint8_t> x = RandomMatrix(kMostTokens, weight.k, in, 36);
      for (ActivationFunction activation :
           {ActivationFunction::kNone, ActivationFunction::kRelu, ActivationFunction::kGelu,
            ActivationFunction::kSilu, ActivationFunction::kGeluTanh}) {
        for (std::optional<float> given : {std::optional<float>(), std::optional<float>(0.02f)}) {
          const Tokens tokens = Quantise(weight, x, in, kMostTokens, given);
          Quantized how = {.how = ActivationQuantization::kPerToken};
          if (given) how = {ActivationQuantization::kStatic, tokens.scales};
          const Product product = bench.Run(x, in, DType::kFp32, kMostTokens, 2, activation, how);
          EXPECT_LE(FrobeniusError(product.y, DType::kFp32,
                                   Definition(weight, tokens, kMostTokens, activation)),
                    kTolerance)
              << Name(in) << " " << Name(activation) << " order " << order << " factor " << factor
              << " transform " << transform << " given " << given.has_value();
        }
      }
    }
  }
}

TEST_P(QuantizedStage, Int8FollowsTheOrderAndRefusesAFactorAndATransform) {
  const auto make = [&](bool factor) {
    return RandomWeight({.k = shape().k,
                         .n = shape().n,
                         .scheme = ParseScheme(shape().scheme).value(),
                         .order = true,
                         .factor = factor,
                         .seed = 37});
  };
  const HostWeight weight = make(false);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  const int64_t rows = std::max<int64_t>(7, row().min_m);
  const Tokens tokens = RandomTokens(rows, weight.k, 38);
  const Product product = Bench(row(), prepared_)
                              .Run(tokens.Bytes(), DType::kInt8, DType::kFp16, rows, 2,
                                   ActivationFunction::kSilu, {.scales = tokens.scales});
  EXPECT_LE(FrobeniusError(product.y, DType::kFp16,
                           Definition(weight, tokens, rows, ActivationFunction::kSilu)),
            ProductTolerance(DType::kFp16, DType::kFp16));
  ASSERT_EQ(Prepare(make(true)), "");
  const float scale = 1;
  const MatmulArgs args = {.weight = prepared_.get(),
                           .x = {nullptr, DType::kInt8, rows, weight.k},
                           .y = {nullptr, DType::kFp16, rows, weight.n},
                           .scales = &scale};
  EXPECT_EQ(QuantizedMatmul(args, Path::kFused, {}).message(),
            "activations dtype: got INT8, expected a floating type: the weight has a factor");
  HostWeight transformed = weight;
  transformed.hadamard = {2, 1};
  if (weight.k % 2 != 0) return;
  ASSERT_EQ(Prepare(transformed), "");
  EXPECT_EQ(QuantizedMatmul({.weight = prepared_.get(), .x = args.x, .y = args.y, .scales = &scale},
                            Path::kFused, {})
                .message(),
            "activations dtype: got INT8, expected a floating type: the weight has a transform");
}

// A token of zeros gives its bias; a token with a NaN or an infinity gives NaN, and its neighbours
// do not change.
TEST_P(QuantizedStage, OddTokens) {
  const HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 39);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  const int64_t rows = std::max<int64_t>(5, row().min_m);
  std::vector<uint8_t> x = RandomMatrix(rows, weight.k, DType::kFp32, 40);
  std::fill(x.begin(), x.begin() + weight.k * 4, 0);
  SetElement(&x, DType::kFp32, weight.k + 3, std::numeric_limits<float>::quiet_NaN());
  SetElement(&x, DType::kFp32, 2 * weight.k + 5, -std::numeric_limits<float>::infinity());
  for (int64_t k = 0; k < weight.k; ++k) SetElement(&x, DType::kFp32, 3 * weight.k + k, 1e-45f);
  for (ActivationQuantization how :
       {ActivationQuantization::kPerToken, ActivationQuantization::kStatic}) {
    const bool given = how == ActivationQuantization::kStatic;
    const Product product =
        Bench(row(), prepared_)
            .Run(x, DType::kFp32, DType::kFp32, rows, 1, ActivationFunction::kNone,
                 {how, given ? std::vector<float>(rows, 0.5f) : std::vector<float>()});
    for (int64_t n = 0; n < weight.n; ++n) {
      EXPECT_EQ(GetElement(product.y, DType::kFp32, n), 0);
      EXPECT_TRUE(std::isnan(GetElement(product.y, DType::kFp32, weight.n + n)));
      EXPECT_TRUE(std::isnan(GetElement(product.y, DType::kFp32, 2 * weight.n + n)));
      EXPECT_EQ(GetElement(product.y, DType::kFp32, 3 * weight.n + n), 0);
      EXPECT_TRUE(std::isfinite(GetElement(product.y, DType::kFp32, 4 * weight.n + n)));
    }
  }
}

std::vector<Shape> QuantizedStagedShapes() {
  return {{300, 71, "w4g64z", 33},
          {256, 40, "w4g128z+int8*c", 33},
          {1100, 24, "w8cs", 33},
          {128, 40, "w4g32r", 33},
          {96, 24, "w3co", 33}};
}

INSTANTIATE_TEST_SUITE_P(Rows, QuantizedConformance,
                         ::testing::Combine(::testing::ValuesIn(RowsOf(Op::kQuantizedActivations)),
                                            ::testing::ValuesIn(QuantizedShapes())),
                         ParamName);
INSTANTIATE_TEST_SUITE_P(Rows, QuantizedStage,
                         ::testing::Combine(::testing::ValuesIn(RowsOf(Op::kQuantizedActivations)),
                                            ::testing::ValuesIn(QuantizedStagedShapes())),
                         ParamName);

}  // namespace
}  // namespace awqd::testing
