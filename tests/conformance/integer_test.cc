// Every row of INT8 activations x schemes x shapes x counts of tokens against the definition:
// the same integers.
#include <cstring>

#include "gtest/gtest.h"
#include "kernels/cpu/reference.h"
#include "tests/conformance/cases.h"

namespace awqd::testing {
namespace {

class IntegerConformance : public Conformance {
 protected:
  void ExpectExact(const HostWeight& weight, const std::vector<uint8_t>& x, int64_t max_m) {
    if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
    Bench bench(row(), prepared_);
    const std::vector<int64_t> want =
        ReferenceIntegers(weight, reinterpret_cast<const int8_t*>(x.data()), max_m);
    for (int64_t m : TokenCounts(max_m)) {
      if (!Serves(row(), m)) continue;
      const Product product = bench.Run(x, DType::kInt8, DType::kInt32, m, m == 5 ? 10 : 1);
      EXPECT_EQ(product.ran, &row());
      for (int64_t i = 0; i < m * weight.n; ++i) {
        int32_t got;
        std::memcpy(&got, product.y.data() + 4 * i, 4);
        ASSERT_EQ(got, want[i]) << "M " << m << ", token " << i / weight.n << ", column "
                                << i % weight.n;
      }
    }
  }
};

TEST_P(IntegerConformance, GivesTheExactIntegers) {
  ExpectExact(MakeWeight(shape(), Scales::kOrdinary, false, 7),
              RandomMatrix(shape().max_m, shape().k, DType::kInt8, 21), shape().max_m);
}

// -128 everywhere and the largest codes give the largest sums.
TEST_P(IntegerConformance, LargestSums) {
  HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 9);
  int byte = 0;
  for (int bit = 0; bit < 8; bit += weight.code_bits()) {
    byte |= ((1 << weight.scheme.bits) - 1) << bit;
  }
  const int64_t used = weight.n * weight.code_bits() % 8;
  for (int64_t i = 0; i < static_cast<int64_t>(weight.codes.size()); ++i) {
    const bool last = (i + 1) % weight.row_bytes() == 0 && used != 0;
    weight.codes[i] = static_cast<uint8_t>(last ? byte & ((1 << used) - 1) : byte);
  }
  std::fill(weight.zeros.begin(), weight.zeros.end(), 0);
  ExpectExact(weight, std::vector<uint8_t>(9 * weight.k, 0x80), 9);
}

TEST_P(IntegerConformance, TakesRowsInAnyOrder) {
  HostWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 11);
  for (int64_t i = 0; i < weight.k; ++i) {
    weight.order.push_back(static_cast<int32_t>(weight.k - 1 - i));
  }
  ExpectExact(weight, RandomMatrix(17, weight.k, DType::kInt8, 22), 17);
}

std::vector<Shape> IntegerShapes() {
  std::vector<Shape> out;
  for (const Shape& shape : Shapes()) {
    const WeightShape facts = ShapeOf(MakeWeight(shape, Scales::kOrdinary, false, 7));
    if (WhyNoIntegers(facts).empty()) out.push_back(shape);
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Rows, IntegerConformance,
                         ::testing::Combine(::testing::ValuesIn(RowsOf(Op::kIntegerMatmul)),
                                            ::testing::ValuesIn(IntegerShapes())),
                         ParamName);

}  // namespace
}  // namespace awqd::testing
