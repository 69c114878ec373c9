// The steps between the products of experts and in a gated MLP, on the device that AWQD_TEST_DEVICE
// names: the bits of FP32 arithmetic in the order of the definition.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "kernels/base/math.h"
#include "kernels/exact.h"
#include "kernels/kernels.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/test_device.h"

namespace awqd::testing {
namespace {

using Bytes = std::vector<uint8_t>;

template <typename T>
Bytes BytesOf(const std::vector<T>& values) {
  const auto* const begin = reinterpret_cast<const uint8_t*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

class StepsTest : public ::testing::Test {
 protected:
  GuardedBuffer Filled(const Bytes& bytes, int64_t misalign = 0) {
    auto buffer =
        GuardedBuffer::Create(device_, static_cast<int64_t>(bytes.size()), misalign).value();
    EXPECT_THAT(buffer.Fill(bytes), IsOk());
    return buffer;
  }
  // The output of a step, once it is done.
  Bytes Take(const absl::Status& enqueued, const GuardedBuffer& buffer) {
    EXPECT_THAT(enqueued, IsOk());
    EXPECT_THAT(stream_->Synchronize(), IsOk());
    EXPECT_THAT(buffer.CheckBands(), IsOk());
    return buffer.Read().value();
  }
  std::vector<int32_t> RandomRows(int64_t count, int64_t below) {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<int32_t>(random_() % below));
    return out;
  }

  Device& device_ = TestDevice();
  std::unique_ptr<Stream> stream_ = device_.CreateStream().value();
  std::mt19937_64 random_{5};
};

TEST_F(StepsTest, GatherCopiesRowsOfAnySizeAndAlignment) {
  for (int64_t row_bytes : {1, 2, 6, 16, 130, 4096, 8208}) {
    for (int64_t misalign : {0, 2}) {
      constexpr int64_t kIn = 37, kOut = 301;
      Bytes in(kIn * row_bytes);
      for (uint8_t& byte : in) byte = static_cast<uint8_t>(random_());
      const std::vector<int32_t> rows = RandomRows(kOut, kIn);
      const GuardedBuffer from = Filled(in, misalign), order = Filled(BytesOf(rows));
      const GuardedBuffer out = GuardedBuffer::Create(device_, kOut * row_bytes).value();
      const GatherArgs args = {from.data(), static_cast<const int32_t*>(order.data()), kOut,
                               row_bytes, out.data()};
      Bytes want;
      for (int32_t row : rows) {
        want.insert(want.end(), in.begin() + row * row_bytes, in.begin() + (row + 1) * row_bytes);
      }
      EXPECT_EQ(Take(GatherRows(args, device_, stream_->view()), out), want)
          << row_bytes << " bytes, " << misalign << " off";
    }
  }
}

// Within the accuracy of libraries' exp and erf.
TEST_F(StepsTest, GateAppliesTheActivationFunctionFirst) {
  const std::vector<float> gate = {-90, -2, -0.5f, -0.0f, 0.25f, 1, 3, 60}, up(8, 2);
  for (const auto& [activation, of] :
       {std::pair<ActivationFunction, double (*)(double)>{
            ActivationFunction::kRelu, [](double v) { return std::max(v, 0.0); }},
        {ActivationFunction::kGelu, [](double v) { return v / 2 * std::erfc(-v / std::sqrt(2)); }},
        {ActivationFunction::kSilu, [](double v) { return v / (1 + std::exp(-v)); }},
        {ActivationFunction::kGeluTanh, [](double v) {
           return v / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
         }}}) {
    const GuardedBuffer a = Filled(BytesOf(gate)), b = Filled(BytesOf(up));
    const GateArgs args = {static_cast<float*>(a.data()), static_cast<const float*>(b.data()), 8,
                           activation};
    const Bytes got = Take(MultiplyByUp(args, device_, stream_->view()), a);
    for (int64_t i = 0; i < 8; ++i) {
      EXPECT_NEAR(GetElement(got, DType::kFp32, i), 2 * of(gate[i]), 1e-6 * std::abs(gate[i]))
          << Name(activation) << " of " << gate[i];
    }
  }
}

// The formulas of GptOssExperts, DeepseekV4MLP and Kimi K3, in double.
struct GateCase {
  ActivationFunction activation;
  GateParameters parameters;
  double (*of)(double gate, double up);
};
double Sigmoid(double v) { return 1 / (1 + std::exp(-v)); }
const GateCase kGates[] = {{ActivationFunction::kSwigluOai,
                            {.limit = 7, .alpha = 1.702f},
                            [](double gate, double up) {
                              const double g = std::min(gate, 7.0), u = std::clamp(up, -7.0, 7.0);
                              return g * Sigmoid(1.702 * g) * (u + 1);
                            }},
                           {ActivationFunction::kSilu,
                            {.limit = 2.5f},
                            [](double gate, double up) {
                              const double g = std::min(gate, 2.5);
                              return g * Sigmoid(g) * std::clamp(up, -2.5, 2.5);
                            }},
                           {ActivationFunction::kSitu,
                            {.beta = 4, .linear_beta = 25},
                            [](double gate, double up) {
                              return 4 * std::tanh(gate / 4) * Sigmoid(gate) * 25 *
                                     std::tanh(up / 25);
                            }},
                           {ActivationFunction::kSitu, {.beta = 1.5f}, [](double gate, double up) {
                              return 1.5 * std::tanh(gate / 1.5) * Sigmoid(gate) * up;
                            }}};

TEST_F(StepsTest, GateOfFunctionsOfGateAndUp) {
  const std::vector<float> values = {-200, -9, -2.5f, -1, -0.25f, 0, 0.5f, 2, 6.5f, 8, 90};
  std::vector<float> gate, up;
  for (const float g : values) {
    for (const float u : values) {
      gate.push_back(g);
      up.push_back(u);
    }
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& [g, u] : {std::pair(nan, 1.0f), {1.0f, nan}}) {
    gate.push_back(g);
    up.push_back(u);
  }
  const auto count = static_cast<int64_t>(gate.size());
  for (const GateCase& one : kGates) {
    const GuardedBuffer a = Filled(BytesOf(gate)), b = Filled(BytesOf(up));
    const GateArgs args = {.gate = a.data(),
                           .up = b.data(),
                           .count = count,
                           .activation = one.activation,
                           .parameters = one.parameters};
    const Bytes got = Take(MultiplyByUp(args, device_, stream_->view()), a);
    for (int64_t i = 0; i < count - 2; ++i) {
      const double want = one.of(gate[i], up[i]);
      EXPECT_NEAR(GetElement(got, DType::kFp32, i), want, 2e-6 * std::abs(want) + 1e-30)
          << Name(one.activation) << " of " << gate[i] << " and " << up[i];
    }
    EXPECT_TRUE(std::isnan(GetElement(got, DType::kFp32, count - 2))) << Name(one.activation);
    EXPECT_TRUE(std::isnan(GetElement(got, DType::kFp32, count - 1))) << Name(one.activation);
  }
}

// FP32, FP16 and BF16 of gate and up, to FP16 with a scale for each row.
TEST_F(StepsTest, GateToFp16OfFunctionsOfGateAndUp) {
  if (device_.host_addressable()) GTEST_SKIP() << "GPUs alone";
  constexpr int64_t kRows = 3, kCols = 136;
  for (const GateCase& one : kGates) {
    for (DType dtype : {DType::kFp32, DType::kFp16, DType::kBf16}) {
      const Bytes gate = RandomMatrix(kRows, kCols, dtype, 1),
                  up = RandomMatrix(kRows, kCols, dtype, 2);
      const GuardedBuffer a = Filled(gate), b = Filled(up);
      const GuardedBuffer half = GuardedBuffer::Create(device_, kRows * kCols * 2).value();
      const GuardedBuffer scale = GuardedBuffer::Create(device_, kRows * 4).value();
      const GateArgs args = {.gate = a.data(),
                             .up = b.data(),
                             .count = kRows * kCols,
                             .activation = one.activation,
                             .parameters = one.parameters,
                             .half = static_cast<uint16_t*>(half.data()),
                             .cols = kCols,
                             .half_scale = static_cast<float*>(scale.data()),
                             .dtype = dtype};
      const Bytes got = Take(MultiplyByUp(args, device_, stream_->view()), half);
      const Bytes scales = scale.Read().value();
      const double whole = 1 / NarrowFactor(dtype);
      for (int64_t row = 0; row < kRows; ++row) {
        std::vector<double> want;
        double largest = 0;
        for (int64_t i = row * kCols; i < (row + 1) * kCols; ++i) {
          want.push_back(
              one.of(GetElement(gate, dtype, i) * whole, GetElement(up, dtype, i) * whole));
          largest = std::max(largest, std::abs(want.back()));
        }
        for (int64_t col = 0; col < kCols; ++col) {
          const double value = GetElement(got, DType::kFp16, row * kCols + col) *
                               GetElement(scales, DType::kFp32, row);
          ASSERT_NEAR(value, want[col], std::max(std::abs(want[col]), largest * 0x1p-15) * 0x1p-10)
              << Name(one.activation) << " " << Name(dtype) << " row " << row << " column " << col;
        }
      }
    }
  }
}

// FP16 times a power of two for each row, which keeps 11 bits of the row's largest number.
TEST_F(StepsTest, GateGivesFp16WithAScaleForEachRow) {
  if (device_.host_addressable()) GTEST_SKIP() << "GPUs alone";
  constexpr int64_t kRows = 5, kCols = 4504;
  std::vector<float> gate, up;
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    gate.push_back(std::ldexp(static_cast<float>(i % 97) - 48, static_cast<int>(i / kCols) * 9));
    up.push_back(static_cast<float>(i % 31) / 16);
  }
  const GuardedBuffer a = Filled(BytesOf(gate)), b = Filled(BytesOf(up));
  const GuardedBuffer half = GuardedBuffer::Create(device_, kRows * kCols * 2).value();
  const GuardedBuffer scale = GuardedBuffer::Create(device_, kRows * 4).value();
  const GateArgs args = {.gate = static_cast<float*>(a.data()),
                         .up = static_cast<const float*>(b.data()),
                         .count = kRows * kCols,
                         .half = static_cast<uint16_t*>(half.data()),
                         .cols = kCols,
                         .half_scale = static_cast<float*>(scale.data())};
  const Bytes got = Take(MultiplyByUp(args, device_, stream_->view()), half);
  const Bytes scales = scale.Read().value();
  for (int64_t row = 0; row < kRows; ++row) {
    const double of_row = GetElement(scales, DType::kFp32, row);
    double largest = 0;
    for (int64_t i = row * kCols; i < (row + 1) * kCols; ++i) {
      largest = std::max(largest, std::abs(double{gate[i]} * up[i]));
    }
    for (int64_t i = row * kCols; i < (row + 1) * kCols; ++i) {
      const double want = double{gate[i]} * up[i];
      ASSERT_NEAR(GetElement(got, DType::kFp16, i) * of_row, want,
                  std::max(std::abs(want), largest * 0x1p-15) * 0x1p-10)
          << "row " << row << " column " << i % kCols;
    }
  }
}

// Gate and up of 16 bits are the same numbers times NarrowFactor.
TEST_F(StepsTest, GateReadsSixteenBits) {
  if (device_.host_addressable()) GTEST_SKIP() << "GPUs alone";
  constexpr int64_t kRows = 600, kCols = 72;
  for (DType dtype : {DType::kFp16, DType::kBf16}) {
    const Bytes gate = RandomMatrix(kRows, kCols, dtype, 1),
                up = RandomMatrix(kRows, kCols, dtype, 2);
    const GuardedBuffer a = Filled(gate), b = Filled(up);
    const GuardedBuffer half = GuardedBuffer::Create(device_, kRows * kCols * 2).value();
    const GuardedBuffer scale = GuardedBuffer::Create(device_, kRows * 4).value();
    const GateArgs args = {.gate = a.data(),
                           .up = b.data(),
                           .count = kRows * kCols,
                           .half = static_cast<uint16_t*>(half.data()),
                           .cols = kCols,
                           .half_scale = static_cast<float*>(scale.data()),
                           .dtype = dtype,
                           .sums_factor = 0.25f};
    const Bytes got = Take(MultiplyByUp(args, device_, stream_->view()), half);
    const Bytes scales = scale.Read().value();
    const double whole = 1 / NarrowFactor(dtype);
    for (int64_t i = 0; i < kRows * kCols; ++i) {
      const double want = GetElement(gate, dtype, i) * GetElement(up, dtype, i) * whole * whole;
      const double of_row = GetElement(scales, DType::kFp32, i / kCols) / 0.25;
      ASSERT_NEAR(GetElement(got, DType::kFp16, i) * of_row, want, std::abs(want) * 0x1p-10 + 1e-6)
          << Name(dtype) << " element " << i;
    }
  }
}

TEST_F(StepsTest, GatherGivesFactors) {
  if (device_.host_addressable()) GTEST_SKIP() << "GPUs alone";
  const Bytes in = RandomMatrix(3, 16, DType::kFp16, 1);
  const std::vector<int32_t> rows = {2, 0, 1, 2};
  const GuardedBuffer from = Filled(in), order = Filled(BytesOf(rows));
  const GuardedBuffer out = GuardedBuffer::Create(device_, 4 * 32).value();
  const GuardedBuffer factors = GuardedBuffer::Create(device_, 4 * 4).value();
  const GatherArgs args = {.in = from.data(),
                           .rows = static_cast<const int32_t*>(order.data()),
                           .count = 4,
                           .row_bytes = 32,
                           .out = out.data(),
                           .factors = static_cast<float*>(factors.data())};
  EXPECT_EQ(Take(GatherRows(args, device_, stream_->view()), factors),
            BytesOf(std::vector<float>(4, kNarrowFactor)));
}

TEST_F(StepsTest, CombineReadsSixteenBits) {
  if (device_.host_addressable()) GTEST_SKIP() << "GPUs alone";
  constexpr int64_t kIn = 41, kCount = 29;
  for (const auto& [cols, dtype] : {std::pair(40, DType::kFp16),
                                    {40, DType::kBf16},
                                    {9, DType::kFp16},
                                    {16384, DType::kFp16},
                                    {16384, DType::kBf16}}) {
    const Bytes in = RandomMatrix(kIn, cols, dtype, 3);
    const std::vector<int32_t> rows = RandomRows(kCount * 2, kIn);
    const GuardedBuffer from = Filled(in), order = Filled(BytesOf(rows));
    const GuardedBuffer y = GuardedBuffer::Create(device_, kCount * cols * 4).value();
    const CombineArgs args = {.in = from.data(),
                              .cols = cols,
                              .rows = static_cast<const int32_t*>(order.data()),
                              .count = kCount,
                              .terms = 2,
                              .y = y.data(),
                              .y_dtype = DType::kFp32,
                              .in_dtype = dtype};
    Bytes want(y.size());
    for (int64_t i = 0; i < kCount * cols; ++i) {
      const int64_t row = i / cols, col = i % cols;
      const float whole = 1 / NarrowFactor(dtype);
      SetElement(&want, DType::kFp32, i,
                 GetElement(in, dtype, rows[2 * row] * cols + col) * whole +
                     GetElement(in, dtype, rows[2 * row + 1] * cols + col) * whole);
    }
    EXPECT_EQ(Take(CombineRows(args, device_, stream_->view()), y), want) << cols << Name(dtype);
  }
}

// Bit for bit TransformBlock, whatever the block, the type and the alignment.
TEST_F(StepsTest, TransformsOfEverySize) {
  constexpr int64_t kRows = 3;
  for (int64_t size = 2; size <= Hadamard::kMostRows; size *= 2) {
    const Hadamard hadamard = {size, 1 / std::sqrt(static_cast<float>(size))};
    const int64_t k = size * (size < 2048 ? 2048 / size + 1 : size < 8192 ? 3 : 1);
    const Bytes factors = RandomMatrix(1, k, DType::kFp32, 7);
    const GuardedBuffer factor = Filled(factors);
    for (const DType dtype : {DType::kFp16, DType::kBf16, DType::kFp32}) {
      for (const bool multiplied : {false, true}) {
        const Bytes x = RandomMatrix(kRows, k, dtype, 8);
        const GuardedBuffer in = Filled(x, multiplied ? SizeOf(dtype) : 0);
        for (const InputForm form : {InputForm::kAny, InputForm::kQuantized}) {
          const GuardedBuffer out = GuardedBuffer::Create(device_, kRows * k * 4).value();
          const auto* const factors_there = static_cast<const float*>(factor.data());
          const auto result =
              StepsOf(device_).transform_rows({.x = {in.data(), dtype, kRows, k},
                                               .factor = multiplied ? factors_there : nullptr,
                                               .hadamard = hadamard,
                                               .form = form,
                                               .out = out.data()},
                                              device_, stream_->view());
          const Bytes got = Take(result.status(), out);
          ASSERT_EQ(result->data, out.data());
          EXPECT_TRUE(form != InputForm::kQuantized || result->dtype == DType::kFp32);
          std::vector<float> want(kRows * k);
          for (int64_t i = 0; i < kRows * k; ++i) {
            want[i] = GetElement(x, dtype, i);
            if (multiplied) want[i] *= GetElement(factors, DType::kFp32, i % k);
          }
          for (int64_t i = 0; i < kRows * k; i += size) TransformBlock(hadamard, &want[i]);
          Bytes expected(kRows * k * SizeOf(result->dtype));
          for (int64_t i = 0; i < kRows * k; ++i) {
            StoreElement(expected.data(), result->dtype, i, want[i]);
          }
          EXPECT_EQ(std::memcmp(got.data(), expected.data(), expected.size()), 0)
              << size << " " << Name(dtype) << " factor " << multiplied;
        }
      }
    }
  }
}

TEST_F(StepsTest, GateIsOneMultiplication) {
  for (int64_t count : {1, 255, 256, 100003}) {
    const Bytes gate = RandomMatrix(1, count, DType::kFp32, 1);
    const Bytes up = RandomMatrix(1, count, DType::kFp32, 2);
    const GuardedBuffer a = Filled(gate), b = Filled(up);
    Bytes want(gate.size());
    for (int64_t i = 0; i < count; ++i) {
      const float product = GetElement(gate, DType::kFp32, i) * GetElement(up, DType::kFp32, i);
      SetElement(&want, DType::kFp32, i, product);
    }
    const GateArgs args = {static_cast<float*>(a.data()), static_cast<const float*>(b.data()),
                           count};
    EXPECT_EQ(Take(MultiplyByUp(args, device_, stream_->view()), a), want) << count;
  }
}

TEST_F(StepsTest, CombineAddsInTheOrderOfChoices) {
  constexpr int64_t kIn = 41, kCount = 29;
  for (int64_t cols : {1, 40, 257, 1024}) {
    for (const auto& [terms, weighted] :
         {std::pair<int64_t, bool>{1, false}, {2, true}, {8, true}}) {
      const Bytes in = RandomMatrix(kIn, cols, DType::kFp32, 3);
      const Bytes weights = RandomMatrix(kCount, terms, DType::kFp32, 4);
      const std::vector<int32_t> rows = RandomRows(kCount * terms, kIn);
      const GuardedBuffer from = Filled(in), order = Filled(BytesOf(rows)), by = Filled(weights);
      for (DType out : {DType::kFp16, DType::kBf16, DType::kFp32}) {
        const GuardedBuffer y = GuardedBuffer::Create(device_, kCount * cols * SizeOf(out)).value();
        CombineArgs args = {.in = static_cast<const float*>(from.data()),
                            .cols = cols,
                            .rows = static_cast<const int32_t*>(order.data()),
                            .count = kCount,
                            .terms = terms,
                            .y = y.data(),
                            .y_dtype = out};
        if (weighted) args.weights = static_cast<const float*>(by.data());
        Bytes want(y.size());
        for (int64_t i = 0; i < kCount * cols; ++i) {
          const int64_t row = i / cols, col = i % cols;
          float sum = 0;
          for (int64_t j = row * terms; j < (row + 1) * terms; ++j) {
            const float value = GetElement(in, DType::kFp32, rows[j] * cols + col);
            // Rounded separately: volatile keeps the compiler from fusing them.
            const volatile float term =
                weighted ? GetElement(weights, DType::kFp32, j) * value : value;
            sum = j == row * terms ? term : sum + term;
          }
          StoreElement(want.data(), out, i, sum);
        }
        EXPECT_EQ(Take(CombineRows(args, device_, stream_->view()), y), want)
            << cols << " columns, " << terms << " terms, " << Name(out);
      }
    }
  }
}

TEST_F(StepsTest, CombineAddsTheSharedRowLast) {
  constexpr int64_t kIn = 7, kCount = 600, kTerms = 2;
  for (int64_t cols : {3, 512}) {  // in few threads, and four columns to a thread
    for (bool weighted : {false, true}) {
      const Bytes in = RandomMatrix(kIn, cols, DType::kFp32, 3);
      const Bytes shared = RandomMatrix(kCount, cols, DType::kFp32, 5);
      const Bytes weights = RandomMatrix(kCount, 1, DType::kFp32, 4);
      const std::vector<int32_t> rows = RandomRows(kCount * kTerms, kIn);
      const GuardedBuffer from = Filled(in), order = Filled(BytesOf(rows)), added = Filled(shared),
                          by = Filled(weights);
      const GuardedBuffer y = GuardedBuffer::Create(device_, kCount * cols * 4).value();
      CombineArgs args = {.in = from.data(),
                          .cols = cols,
                          .rows = static_cast<const int32_t*>(order.data()),
                          .count = kCount,
                          .terms = kTerms,
                          .y = y.data(),
                          .y_dtype = DType::kFp32,
                          .added = static_cast<const float*>(added.data())};
      if (weighted) args.added_weights = static_cast<const float*>(by.data());
      Bytes want(y.size());
      for (int64_t i = 0; i < kCount * cols; ++i) {
        const int64_t row = i / cols, col = i % cols;
        const float sum = GetElement(in, DType::kFp32, rows[2 * row] * cols + col) +
                          GetElement(in, DType::kFp32, rows[2 * row + 1] * cols + col);
        const float value = GetElement(shared, DType::kFp32, i);
        // Rounded separately: volatile keeps the compiler from fusing them.
        const volatile float term =
            weighted ? GetElement(weights, DType::kFp32, row) * value : value;
        SetElement(&want, DType::kFp32, i, sum + term);
      }
      EXPECT_EQ(Take(CombineRows(args, device_, stream_->view()), y), want)
          << cols << " columns" << (weighted ? ", weighted" : "");
    }
  }
}

// FP32 sums of K products, and one exponential.
TEST_F(StepsTest, TokensAreGated) {
  constexpr int64_t kTokens = 9;
  for (int64_t k : {1, 40, 511, 7168}) {
    for (DType dtype : {DType::kFp16, DType::kBf16, DType::kFp32, DType::kE4m3}) {
      const Bytes x = RandomMatrix(kTokens, k, dtype, 1),
                  gates = RandomMatrix(2, k, DType::kFp32, 2);
      const std::vector<int32_t> which = RandomRows(kTokens, 2);
      const GuardedBuffer tokens = Filled(x), of = Filled(gates), number = Filled(BytesOf(which));
      const GuardedBuffer out = GuardedBuffer::Create(device_, kTokens * 4).value();
      constexpr int64_t kScaled = 128;
      const int64_t blocks = CeilDiv(k, kScaled);
      std::vector<float> scales;
      for (int64_t i = 0; i < kTokens * blocks; ++i) {
        scales.push_back(dtype == DType::kE4m3 ? 0.25f * static_cast<float>(1 + i % 5) : 1);
      }
      const GuardedBuffer of_blocks = Filled(BytesOf(scales));
      TokenGateArgs args = {.x = {tokens.data(), dtype, kTokens, k},
                            .gates = static_cast<const float*>(of.data()),
                            .which = static_cast<const int32_t*>(number.data()),
                            .out = static_cast<float*>(out.data())};
      if (dtype == DType::kE4m3) {
        args.scales = static_cast<const float*>(of_blocks.data());
        args.scaled = kScaled;
      }
      const Bytes got = Take(GateTokens(args, device_, stream_->view()), out);
      for (int64_t t = 0; t < kTokens; ++t) {
        double sum = 0, magnitudes = 0;
        for (int64_t i = 0; i < k; ++i) {
          const double term = GetElement(x, dtype, t * k + i) * scales[t * blocks + i / kScaled] *
                              GetElement(gates, DType::kFp32, which[t] * k + i);
          sum += term;
          magnitudes += std::abs(term);
        }
        // The slope of the sigmoid is at most 1 / 4; a thread adds K / 256 products.
        const double bound = magnitudes / 4 * (static_cast<double>(k) / 256 + 16) * 0x1p-24 + 1e-6;
        EXPECT_NEAR(GetElement(got, DType::kFp32, t), Sigmoid(sum), bound)
            << Name(dtype) << " K = " << k << " token " << t;
      }
    }
  }
}

TEST_F(StepsTest, ChoicesAreSortedByExpert) {
  for (const auto& [choices, top_k, experts] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1},
                                                {8, 8, 256},
                                                {31, 1, 3},
                                                {33, 3, 5},
                                                {1024, 4, 8},
                                                {5000, 2, 300},
                                                {70000, 7, 17}}) {
    // Some are of no expert.
    std::vector<int32_t> ids = RandomRows(choices, experts + 2);
    for (int32_t& id : ids) id = id == experts + 1 ? -1 : id;
    if (choices == 31) std::fill(ids.begin(), ids.end(), 77);
    std::vector<int32_t> ends, tokens, rows(choices, -1);
    for (int64_t e = 0; e < experts; ++e) {
      for (int64_t i = 0; i < choices; ++i) {
        if (ids[i] != e) continue;
        rows[i] = static_cast<int32_t>(tokens.size());
        tokens.push_back(static_cast<int32_t>(i / top_k));
      }
      ends.push_back(static_cast<int32_t>(tokens.size()));
    }
    tokens.resize(choices);
    const GuardedBuffer from = Filled(BytesOf(ids));
    const auto room = [&](int64_t count) {
      return GuardedBuffer::Create(device_, count * 4).value();
    };
    const GuardedBuffer got_ends = room(experts), got_tokens = room(choices),
                        got_rows = room(choices);
    const SortArgs args = {.ids = static_cast<const int32_t*>(from.data()),
                           .choices = choices,
                           .top_k = top_k,
                           .experts = experts,
                           .ends = static_cast<int32_t*>(got_ends.data()),
                           .tokens = static_cast<int32_t*>(got_tokens.data()),
                           .rows = static_cast<int32_t*>(got_rows.data())};
    EXPECT_EQ(Take(SortChoices(args, device_, stream_->view()), got_ends), BytesOf(ends))
        << choices;
    EXPECT_EQ(Take(absl::OkStatus(), got_tokens), BytesOf(tokens)) << choices;
    EXPECT_EQ(Take(absl::OkStatus(), got_rows), BytesOf(rows)) << choices;
  }
}

TEST_F(StepsTest, CombineLeavesOutRowsBelowZero) {
  constexpr int64_t kIn = 9, kCount = 700;
  for (int64_t cols : {3, 512}) {  // in few threads, and four columns to a thread
    const Bytes in = RandomMatrix(kIn, cols, DType::kFp32, 3);
    std::vector<int32_t> rows = RandomRows(kCount * 2, kIn + 3);
    for (int32_t& row : rows) row = row < kIn ? row : -1;
    rows[0] = rows[1] = -1;
    const GuardedBuffer from = Filled(in), order = Filled(BytesOf(rows));
    const GuardedBuffer y = GuardedBuffer::Create(device_, kCount * cols * 4).value();
    const CombineArgs args = {.in = from.data(),
                              .cols = cols,
                              .rows = static_cast<const int32_t*>(order.data()),
                              .count = kCount,
                              .terms = 2,
                              .y = y.data(),
                              .y_dtype = DType::kFp32};
    Bytes want(y.size());
    for (int64_t i = 0; i < kCount * cols; ++i) {
      float sum = 0;
      for (int64_t j = i / cols * 2; j < i / cols * 2 + 2; ++j) {
        if (rows[j] >= 0) sum += GetElement(in, DType::kFp32, rows[j] * cols + i % cols);
      }
      SetElement(&want, DType::kFp32, i, sum);
    }
    EXPECT_EQ(Take(CombineRows(args, device_, stream_->view()), y), want) << cols;
  }
}

TEST_F(StepsTest, NothingToDoSucceeds) {
  EXPECT_THAT(GateTokens({}, device_, stream_->view()), IsOk());
  EXPECT_THAT(GatherRows({}, device_, stream_->view()), IsOk());
  EXPECT_THAT(MultiplyByUp({}, device_, stream_->view()), IsOk());
  EXPECT_THAT(CombineRows({}, device_, stream_->view()), IsOk());
}

}  // namespace
}  // namespace awqd::testing
