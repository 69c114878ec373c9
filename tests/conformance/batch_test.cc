// Batch-invariant rows give a token the same bits in every batch, and as other rows of their
// layout.
#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/reference.h"
#include "kernels/exact.h"
#include "tests/conformance/cases.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"

namespace awqd::testing {
namespace {

class BatchInvariance : public Conformance {};

TEST_P(BatchInvariance, ATokenHasTheSameBitsInEveryBatch) {
  const HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 13);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Bench bench(row(), prepared_);
  const int64_t most = std::min<int64_t>(shape().max_m, 257);
  for (DType in : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    const std::vector<uint8_t> x = RandomMatrix(most, weight.k, in, 14);
    const std::vector<uint8_t> all = bench.Run(x, in, DType::kFp32, most).y;
    for (int64_t m : TokenCounts(most)) {
      if (!Serves(row(), m)) continue;
      // The last tokens, so that they also move to other positions.
      const int64_t begin = most - m;
      const std::vector<uint8_t> last(x.begin() + begin * weight.k * SizeOf(in), x.end());
      const std::vector<uint8_t> want(all.begin() + begin * weight.n * 4, all.end());
      EXPECT_EQ(FirstDifference(bench.Run(last, in, DType::kFp32, m).y, want), -1)
          << "M " << m << " of " << most << " " << Name(in);
    }
  }
}

// A token keeps its bits where one row takes over from another as M grows.
class RowsOfOneLayout : public ::testing::TestWithParam<Shape> {};

std::vector<Shape> LayerShapes() {
  // K-ranges of K that are cut, whole, uneven and empty; tiles of N that do and do not fill a
  // device.
  std::vector<Shape> out = {{4096, 4096, "w4g128z", 1025},
                            {2048, 6144, "w4g128s", 513},
                            {1408, 4096, "w4g128z", 600},
                            {1280, 1096, "w4g32z", 2049},
                            {300, 10240, "w4cz", 385}};
  if (FullRun()) {
    for (const Shape& more : std::initializer_list<Shape>{{11008, 4096, "w4g128z", 300},
                                                          {4096, 28672, "w4g128z", 257},
                                                          {14336, 4096, "w4g16z", 257},
                                                          {8192, 10240, "w4g64z", 129},
                                                          {16384, 6144, "w4g128z", 129}}) {
      out.push_back(more);
    }
  }
  return out;
}

std::string LayerName(const ::testing::TestParamInfo<Shape>& info) {
  return Plain(absl::StrCat("k", info.param.k, "_n", info.param.n, "_", info.param.scheme));
}

TEST_P(RowsOfOneLayout, GiveTheSameBits) {
  const Shape& shape = GetParam();
  const HostWeight weight = MakeWeight(shape, Scales::kOrdinary, true, 15);
  const WeightShape facts = ShapeOf(weight);
  std::map<const Layout*, std::vector<const KernelRow*>> rows;
  for (const KernelRow* row : BatchInvariantRows()) {
    if (row->layout == nullptr || !WhyNot(*row, facts, TestDevice().info()).empty()) continue;
    rows[row->layout].push_back(row);
  }
  int compared = 0;
  for (const auto& [layout, readers] : rows) {
    if (readers.size() < 2) continue;
    for (DType in : {DType::kFp16, DType::kBf16}) {
      const std::vector<uint8_t> x = RandomMatrix(shape.max_m, weight.k, in, 16);
      std::map<int64_t, std::vector<uint8_t>> first;
      for (const KernelRow* row : readers) {
        Bench bench(*row, PrepareFor(*row, weight, TestDevice()).value());
        std::vector<uint8_t> fewer;
        for (int64_t m : {8, 16, 17, 32, 33, 64, 65, 128, 129, 250, 256, 384, 512, 1024, 2048}) {
          if (m >= shape.max_m || !Serves(*row, m)) continue;
          std::vector<uint8_t> y = bench.Run(x, in, DType::kFp32, m, 2).y;
          EXPECT_EQ(FirstDifference({y.begin(), y.begin() + fewer.size()}, fewer), -1)
              << row->name << ", M " << m << " and the count before, " << Name(in);
          if (row == readers.front()) {
            first[m] = y;
          } else if (first.count(m) == 1) {
            EXPECT_EQ(FirstDifference(y, first[m]), -1)
                << row->name << " and " << readers.front()->name << ", M " << m << " " << Name(in);
            ++compared;
          }
          fewer = std::move(y);
        }
      }
    }
  }
  if (compared == 0) GTEST_SKIP() << "no layout with two batch-invariant rows on this device";
}

INSTANTIATE_TEST_SUITE_P(Rows, BatchInvariance,
                         ::testing::Combine(::testing::ValuesIn(BatchInvariantRows()),
                                            ::testing::ValuesIn(Shapes())),
                         ParamName);
INSTANTIATE_TEST_SUITE_P(Layers, RowsOfOneLayout, ::testing::ValuesIn(LayerShapes()), LayerName);
}  // namespace
}  // namespace awqd::testing
