// Stage and finish, which rows do not know: an order, a factor and a transform of the weight, and
// activation functions, with every row.
#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/reference.h"
#include "kernels/exact.h"
#include "tests/conformance/cases.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"

namespace awqd::testing {
namespace {

// K that is a multiple of 8 or not, groups of whole records and shorter ones, N of whole tiles or
// not.
std::vector<Shape> StagedShapes() {
  return {{256, 72, "w4g32z", 33},  {300, 71, "w4g64s", 17},         {384, 64, "w8cs", 33},
          {256, 136, "w3g128z", 9}, {96, 40, "w4g24z", 9},           {128, 24, "e2m1g32+e8m0", 9},
          {128, 40, "w4g32z*c", 9}, {160, 72, "e4m3b128x32+fp32", 9}};
}

// The largest block of a transform that divides K.
int64_t BlockOf(int64_t k) { return std::min(k & -k, Hadamard::kMostRows); }

HostWeight MakeStaged(const Shape& shape, bool order, bool factor, bool transform = false) {
  return RandomWeight({.k = shape.k,
                       .n = shape.n,
                       .scheme = ParseScheme(shape.scheme).value(),
                       .bias = true,
                       .order = order,
                       .factor = factor,
                       .hadamard = transform ? BlockOf(shape.k) : 0,
                       .seed = 21});
}

class StageAndFinish : public Conformance {};

TEST_P(StageAndFinish, OrderFactorAndActivationFunction) {
  for (const auto& [order, factor, transform] : {std::tuple{true, false, false},
                                                 {false, true, false},
                                                 {true, true, false},
                                                 {false, false, true},
                                                 {true, true, true}}) {
    const HostWeight weight = MakeStaged(shape(), order, factor, transform);
    if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
    Bench bench(row(), prepared_);
    for (DType in : {DType::kFp16, DType::kBf16, DType::kFp32}) {
      if ((row().inputs & MaskOf(in)) == 0) continue;
      int64_t max_m = std::max<int64_t>(shape().max_m, row().min_m);
      if (row().max_m >= 0) max_m = std::min(max_m, row().max_m);
      const std::vector<uint8_t> x = RandomMatrix(max_m, weight.k, in, 22);
      for (ActivationFunction activation :
           {ActivationFunction::kNone, ActivationFunction::kRelu, ActivationFunction::kGelu,
            ActivationFunction::kSilu, ActivationFunction::kGeluTanh}) {
        const std::vector<double> want =
            ReferenceProduct(weight, {.x = {x.data(), in, max_m, weight.k},
                                      .bias = weight.bias.data(),
                                      .activation = activation});
        for (DType out : {in, DType::kFp32}) {
          const Product product = bench.Run(x, in, out, max_m, 2, activation);
          EXPECT_EQ(product.ran, &row());
          EXPECT_LE(FrobeniusError(product.y, out, want), ProductTolerance(out, in))
              << Name(in) << " -> " << Name(out) << " " << Name(activation) << " order " << order
              << " factor " << factor << " transform " << transform;
        }
      }
    }
  }
}

// A block of a weight with an order contains its rows by in-feature.
class Reordered : public Conformance {};

TEST_P(Reordered, RowsAreInFeatures) {
  const HostWeight weight = MakeStaged(shape(), true, true);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  std::vector<int64_t> stored(weight.k);
  for (int64_t i = 0; i < weight.k; ++i) stored[weight.order[i]] = i;
  Device& device = TestDevice();
  auto stream = device.CreateStream().value();
  const int64_t k = weight.k, n = weight.n;
  for (DType out : {DType::kFp16, DType::kFp32}) {
    for (const auto& [row_begin, rows, col_begin, cols] :
         {std::tuple<int64_t, int64_t, int64_t, int64_t>{0, k, 0, n}, {k / 3, 5, 1, n - 1}}) {
      auto y = GuardedBuffer::Create(device, rows * cols * SizeOf(out)).value();
      auto workspace =
          GuardedBuffer::CreateScratch(device, DequantizeWorkspaceBytes(*prepared_, cols, out))
              .value();
      const DequantizeArgs args = {
          prepared_.get(), {y.data(), out, rows, cols}, row_begin, col_begin};
      ASSERT_THAT(Dequantize(args, workspace.data(), stream->view()), IsOk());
      ASSERT_THAT(stream->Synchronize(), IsOk());
      EXPECT_THAT(y.CheckBands(), IsOk());
      EXPECT_THAT(workspace.CheckBands(), IsOk());
      std::vector<uint8_t> want(y.size());
      for (int64_t i = 0; i < rows * cols; ++i) {
        StoreElement(want.data(), out, i,
                     WeightValue(weight, stored[row_begin + i / cols], col_begin + i % cols));
      }
      EXPECT_EQ(FirstDifference(y.Read().value(), want), -1) << Name(out) << " rows " << rows;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, StageAndFinish,
                         ::testing::Combine(::testing::ValuesIn(RowsOf(Op::kMatmul)),
                                            ::testing::ValuesIn(StagedShapes())),
                         ParamName);
INSTANTIATE_TEST_SUITE_P(Rows, Reordered,
                         ::testing::Combine(::testing::ValuesIn(RowsOf(Op::kDequantize)),
                                            ::testing::ValuesIn(StagedShapes())),
                         ParamName);

}  // namespace
}  // namespace awqd::testing
