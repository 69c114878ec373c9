// The steps between the products of experts and in a gated MLP, on the device that AWQD_TEST_DEVICE
// names: the bits of FP32 arithmetic in the order of the definition.
#include <cmath>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
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
        {ActivationFunction::kSilu, [](double v) { return v / (1 + std::exp(-v)); }}}) {
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

TEST_F(StepsTest, NothingToDoSucceeds) {
  EXPECT_THAT(GatherRows({}, device_, stream_->view()), IsOk());
  EXPECT_THAT(MultiplyByUp({}, device_, stream_->view()), IsOk());
  EXPECT_THAT(CombineRows({}, device_, stream_->view()), IsOk());
}

}  // namespace
}  // namespace awqd::testing
