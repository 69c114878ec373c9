// Every dequantize row x schemes x shapes: the bits of exact.h.
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

class DequantizeConformance : public Conformance {};

TEST_P(DequantizeConformance, RoundsTheExactWeightOnce) {
  const HostWeight weight = MakeWeight(shape(), Scales::kExtreme, false, 10);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Device& device = TestDevice();
  auto stream = device.CreateStream().value();
  struct Block {
    int64_t row, col, rows, cols;
  };
  const int64_t k = weight.k, n = weight.n;
  const Block blocks[] = {{0, 0, k, n},
                          {k / 3, n / 3, k - k / 3, n - n / 3},
                          {k / 2, std::min<int64_t>(1, n - 1), 1, std::max<int64_t>(1, n - 1)},
                          {0, n - 1, k, 1},
                          {k - 1, n / 2, 1, std::min<int64_t>(3, n - n / 2)}};
  for (DType out : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    if ((row().outputs & MaskOf(out)) == 0) continue;
    for (const Block& b : blocks) {
      auto buffer = GuardedBuffer::Create(device, b.rows * b.cols * SizeOf(out)).value();
      const DequantizeArgs args = {
          prepared_.get(), {buffer.data(), out, b.rows, b.cols}, b.row, b.col};
      const KernelRow* ran = nullptr;
      ASSERT_THAT(Dequantize(args, nullptr, stream->view(), &ran), IsOk());
      ASSERT_THAT(stream->Synchronize(), IsOk());
      EXPECT_EQ(ran, &row());
      EXPECT_THAT(buffer.CheckBands(), IsOk());
      std::vector<uint8_t> want(buffer.size());
      for (int64_t i = 0; i < b.rows * b.cols; ++i) {
        StoreElement(want.data(), out, i,
                     WeightValue(weight, b.row + i / b.cols, b.col + i % b.cols));
      }
      const int64_t at = FirstDifference(buffer.Read().value(), want);
      EXPECT_EQ(at, -1) << Name(out) << " block " << b.row << "," << b.col << " element "
                        << at / SizeOf(out) / b.cols << "," << at / SizeOf(out) % b.cols;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, DequantizeConformance,
                         ::testing::Combine(::testing::ValuesIn(RowsOf(Op::kDequantize)),
                                            ::testing::ValuesIn(Shapes())),
                         ParamName);

}  // namespace
}  // namespace awqd::testing
