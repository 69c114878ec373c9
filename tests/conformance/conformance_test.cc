// Walks every registry row x schemes x shapes x token counts against the oracle in double.
//
// Rows that the device or the shape rules out are reported as skipped, by name and with the reason.
// Environment: AWQD_TEST_DEVICE, AWQD_TEST_FULL=1 (more shapes and token counts).
#include <algorithm>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/reference.h"
#include "kernels/kernels.h"
#include "tests/testing/guarded_buffer.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"
#include "tests/testing/test_device.h"

namespace awqd::testing {
namespace {

struct Shape {
  int64_t k, n, group;
  const char* scheme;  // of ParseScheme, its group replaced
  int64_t max_m;
};

std::vector<Shape> Shapes() {
  std::vector<Shape> out = {
      {32, 8, 16, "a16w4g1z", 4097},     {32, 64, 32, "a16w4g1s", 4097},
      {64, 72, 64, "a16w4g1z", 4097},    {96, 128, 32, "a16w4g1z", 4097},
      {128, 192, 128, "a16w4g1z", 4097}, {128, 64, 16, "a16w4g1zb", 1024},
      {70, 64, 7, "a16w4g1z", 257},      {130, 72, 10, "a16w4g1s", 257},
      {264, 128, 24, "a16w4g1z", 257},   {1, 8, 1, "a16w4g1z", 65},
      {96, 64, 96, "a16w3g1z", 65},      {64, 64, 32, "a16w2g1s", 65},
      {64, 64, 32, "a16w8g1z", 65},      {4096, 192, 128, "a16w4g1z", 129},
      {512, 4096, 64, "a16w4g1z", 33},   {10944, 72, 32, "a16w4g1z", 17},
      {2048, 136, 2048, "a16w4g1z", 33}, {256, 72, 128, "a16w4g1zf", 33},
      {1024, 136, 128, "a16w4g1z", 257}, {256, 128, 32, "a16w4g1z", 257},
  };
  if (FullRun()) {
    for (const Shape& more : std::initializer_list<Shape>{{4096, 4096, 128, "a16w4g1z", 257},
                                                          {14336, 4096, 128, "a16w4g1z", 65},
                                                          {4096, 28672, 128, "a16w4g1z", 17},
                                                          {29568, 192, 64, "a16w4g1s", 257},
                                                          {10944, 4096, 16, "a16w4g1zb", 33}}) {
      out.push_back(more);
    }
  }
  return out;
}

std::vector<int64_t> TokenCounts(int64_t max_m) {
  std::vector<int64_t> out;
  for (int64_t m : {0,  1,  2,  3,  4,  5,   6,   7,   8,   9,   15,  16,  17,   31,
                    32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 1024, 4097}) {
    if (m <= max_m) out.push_back(m);
  }
  return out;
}

CanonicalWeight MakeWeight(const Shape& shape, Scales scales, bool bias, uint64_t seed) {
  WeightSpec spec;
  spec.k = shape.k;
  spec.n = shape.n;
  spec.scheme = ParseScheme(shape.scheme).value();
  spec.scheme.group_size = shape.group;
  spec.scales = scales;
  spec.bias = bias;
  spec.seed = seed;
  return RandomWeight(spec);
}

using Param = std::tuple<const KernelRow*, Shape>;

std::string ParamName(const ::testing::TestParamInfo<Param>& info) {
  const auto& [row, shape] = info.param;
  return absl::StrCat(TestName(*row), "_k", shape.k, "_n", shape.n, "_g", shape.group, "_",
                      shape.scheme);
}

std::vector<const KernelRow*> RowsOf(Op op) {
  std::vector<const KernelRow*> out;
  for (const KernelRow* row : AllKernels()) {
    if (row->op == op) out.push_back(row);
  }
  return out;
}

std::vector<const KernelRow*> BatchInvariantRows() {
  std::vector<const KernelRow*> out;
  for (const KernelRow* row : RowsOf(Op::kMatmul)) {
    if (row->batch_invariant) out.push_back(row);
  }
  return out;
}

// One run of a product in guarded memory.
struct Product {
  std::vector<uint8_t> y;
  const KernelRow* ran = nullptr;
};

class Bench {
 public:
  Bench(const KernelRow& row, std::shared_ptr<const DeviceWeight> weight)
      : row_(row), weight_(std::move(weight)) {}

  Product Run(const std::vector<uint8_t>& x, DType in, DType out, int64_t m, int repeats = 1) {
    Device& device = TestDevice();
    const WeightShape& shape = weight_->shape;
    auto guarded_x = GuardedBuffer::Create(device, m * shape.k * SizeOf(in)).value();
    auto y = GuardedBuffer::Create(device, m * shape.n * SizeOf(out)).value();
    auto workspace = GuardedBuffer::CreateScratch(
                         device, WorkspaceBytes(*weight_, row_.path, std::max<int64_t>(m, 1)))
                         .value();
    EXPECT_THAT(guarded_x.Fill({x.begin(), x.begin() + guarded_x.size()}), IsOk());
    auto stream = device.CreateStream().value();
    const MatmulArgs args = {weight_.get(),
                             {guarded_x.data(), in, m, shape.k},
                             {y.data(), out, m, shape.n},
                             weight_->bias_data(),
                             workspace.data()};
    Product product;
    for (int i = 0; i < repeats; ++i) {
      EXPECT_THAT(y.Poison(), IsOk());
      EXPECT_THAT(workspace.Poison(), IsOk());
      EXPECT_THAT(QuantizedMatmul(args, row_.path, stream->view(), &product.ran), IsOk());
      EXPECT_THAT(stream->Synchronize(), IsOk());
      std::vector<uint8_t> got = y.Read().value();
      if (i > 0) {
        EXPECT_EQ(FirstDifference(got, product.y), -1) << "repeat " << i;
      }
      product.y = std::move(got);
    }
    for (const GuardedBuffer* buffer : {&guarded_x, &y, &workspace}) {
      EXPECT_THAT(buffer->CheckBands(), IsOk());
    }
    return product;
  }

 private:
  const KernelRow& row_;
  std::shared_ptr<const DeviceWeight> weight_;
};

class Conformance : public ::testing::TestWithParam<Param> {
 protected:
  const KernelRow& row() const { return *std::get<0>(GetParam()); }
  const Shape& shape() const { return std::get<1>(GetParam()); }

  // The weight prepared for the row, or the reason why the row cannot serve it.
  std::string Prepare(const CanonicalWeight& weight) {
    const WeightShape facts{weight.k, weight.n, weight.scheme};
    std::string why = WhyNot(row(), facts, TestDevice().info());
    if (!why.empty()) return absl::StrCat(row().name, ": ", why);
    auto prepared = PrepareFor(row(), weight, TestDevice());
    EXPECT_THAT(prepared.status(), IsOk());
    if (prepared.ok()) prepared_ = *prepared;
    return prepared.ok() ? "" : "not prepared";
  }

  std::shared_ptr<const DeviceWeight> prepared_;
};

class MatmulConformance : public Conformance {};
class DequantizeConformance : public Conformance {};

bool Serves(const KernelRow& row, int64_t m) {
  m = std::max<int64_t>(m, 1);
  return m >= row.min_m && (row.max_m < 0 || m <= row.max_m);
}

std::vector<double> FirstRows(const std::vector<double>& all, int64_t count) {
  return {all.begin(), all.begin() + count};
}

TEST_P(MatmulConformance, AgreesWithTheOracle) {
  const CanonicalWeight weight = MakeWeight(shape(), Scales::kOrdinary, shape().n % 16 == 0, 7);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Bench bench(row(), prepared_);
  for (DType in : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    if ((row().inputs & MaskOf(in)) == 0) continue;
    const int64_t max_m = in == DType::kFp16 ? shape().max_m : std::min<int64_t>(shape().max_m, 33);
    const std::vector<uint8_t> x = RandomMatrix(max_m, weight.k, in, 11);
    const std::vector<double> want =
        ReferenceProduct(weight, {x.data(), in, max_m, weight.k},
                         weight.bias.empty() ? nullptr : weight.bias.data());
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
  const CanonicalWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 8);
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

class BatchInvariance : public Conformance {};

TEST_P(BatchInvariance, ATokenHasTheSameBitsInEveryBatch) {
  const CanonicalWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 13);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Bench bench(row(), prepared_);
  const int64_t most = std::min<int64_t>(shape().max_m, 257);
  for (DType in : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    const std::vector<uint8_t> x = RandomMatrix(most, weight.k, in, 14);
    const std::vector<uint8_t> all = bench.Run(x, in, DType::kFp32, most).y;
    for (int64_t m : TokenCounts(most)) {
      if (!Serves(row(), m)) continue;
      // The last ones, so that tokens move to other places as well.
      const int64_t begin = most - m;
      const std::vector<uint8_t> last(x.begin() + begin * weight.k * SizeOf(in), x.end());
      const std::vector<uint8_t> want(all.begin() + begin * weight.n * 4, all.end());
      EXPECT_EQ(FirstDifference(bench.Run(last, in, DType::kFp32, m).y, want), -1)
          << "M " << m << " of " << most << " " << Name(in);
    }
  }
}

// Where one row hands over to another as M grows, a token keeps its bits.
class RowsOfOneLayout : public ::testing::TestWithParam<Shape> {};

std::vector<Shape> LayerShapes() {
  // Chains of K that are cut, whole, uneven and empty; tiles of N that do and do not fill a device.
  std::vector<Shape> out = {{4096, 4096, 128, "a16w4g1z", 1025},
                            {2048, 6144, 128, "a16w4g1s", 513},
                            {1408, 4096, 128, "a16w4g1z", 600},
                            {1280, 1096, 32, "a16w4g1z", 2049},
                            {300, 10240, 300, "a16w4g1z", 385}};
  if (FullRun()) {
    for (const Shape& more : std::initializer_list<Shape>{{11008, 4096, 128, "a16w4g1z", 300},
                                                          {4096, 28672, 128, "a16w4g1z", 257},
                                                          {14336, 4096, 16, "a16w4g1z", 257},
                                                          {8192, 10240, 64, "a16w4g1z", 129},
                                                          {16384, 6144, 128, "a16w4g1z", 129}}) {
      out.push_back(more);
    }
  }
  return out;
}

std::string LayerName(const ::testing::TestParamInfo<Shape>& info) {
  return absl::StrCat("k", info.param.k, "_n", info.param.n, "_g", info.param.group);
}

TEST_P(RowsOfOneLayout, GiveTheSameBits) {
  const Shape& shape = GetParam();
  const CanonicalWeight weight = MakeWeight(shape, Scales::kOrdinary, true, 15);
  const WeightShape facts{weight.k, weight.n, weight.scheme};
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

// All weights 1: partial sums climb far beyond 65504 and come back.
TEST_P(MatmulConformance, PartialSumsMayPassTheRangeOfHalf) {
  CanonicalWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 9);
  if (weight.k < 64 || weight.scheme.scale_dtype != DType::kFp16) GTEST_SKIP() << "K too small";
  for (uint8_t& scale : weight.scales) scale = 0;
  for (size_t i = 1; i < weight.scales.size(); i += 2) weight.scales[i] = 0x3c;
  for (uint8_t& code : weight.codes) code = 0;
  std::fill(weight.zeros.begin(), weight.zeros.end(), 1);
  if (weight.zeros.empty()) GTEST_SKIP() << "symmetric";
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
      ReferenceProduct(weight, {x.data(), DType::kFp16, m, weight.k}, nullptr);
  const Product product = Bench(row(), prepared_).Run(x, DType::kFp16, DType::kFp16, m);
  for (int64_t i = 0; i < m * weight.n; ++i) {
    EXPECT_EQ(GetElement(product.y, DType::kFp16, i), want[i]) << "column " << i % weight.n;
  }
}

// Weights of -4608 as 14 less 15: what a layout pads K with must not be a code that these scales
// turn into an infinity, which zeros beside the activations would turn into a NaN.
TEST_P(MatmulConformance, PaddingIsZeroWhateverTheScale) {
  CanonicalWeight weight = MakeWeight(shape(), Scales::kOrdinary, false, 17);
  if (weight.zeros.empty()) GTEST_SKIP() << "symmetric";
  if (weight.scheme.scale_dtype != DType::kFp16) GTEST_SKIP() << "other scales";
  const int most = (1 << weight.scheme.bits) - 1;
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

TEST_P(DequantizeConformance, RoundsTheExactWeightOnce) {
  const CanonicalWeight weight = MakeWeight(shape(), Scales::kExtreme, false, 10);
  if (std::string why = Prepare(weight); !why.empty()) GTEST_SKIP() << why;
  Device& device = TestDevice();
  auto stream = device.CreateStream().value();
  struct Block {
    int64_t row, col, rows, cols;
  };
  const int64_t k = weight.k, n = weight.n;
  const Block blocks[] = {{0, 0, k, n},
                          {k / 3, n / 3, k - k / 3, n - n / 3},
                          {k / 2, 1, 1, n - 1},
                          {0, n - 1, k, 1},
                          {k - 1, n / 2 + 1, 1, 3}};
  for (DType out : {DType::kFp16, DType::kBf16, DType::kFp32}) {
    if ((row().outputs & MaskOf(out)) == 0) continue;
    for (const Block& b : blocks) {
      auto buffer = GuardedBuffer::Create(device, b.rows * b.cols * SizeOf(out)).value();
      const DequantizeArgs args = {
          prepared_.get(), {buffer.data(), out, b.rows, b.cols}, b.row, b.col};
      const KernelRow* ran = nullptr;
      ASSERT_THAT(Dequantize(args, stream->view(), &ran), IsOk());
      ASSERT_THAT(stream->Synchronize(), IsOk());
      EXPECT_EQ(ran, &row());
      EXPECT_THAT(buffer.CheckBands(), IsOk());
      std::vector<uint8_t> want(buffer.size());
      for (int64_t i = 0; i < b.rows * b.cols; ++i) {
        StoreElement(want.data(), out, i,
                     ExactWeight(weight, b.row + i / b.cols, b.col + i % b.cols));
      }
      const int64_t at = FirstDifference(buffer.Read().value(), want);
      EXPECT_EQ(at, -1) << Name(out) << " block " << b.row << "," << b.col << " element "
                        << at / SizeOf(out) / b.cols << "," << at / SizeOf(out) % b.cols;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, MatmulConformance,
                         ::testing::Combine(::testing::ValuesIn(RowsOf(Op::kMatmul)),
                                            ::testing::ValuesIn(Shapes())),
                         ParamName);
INSTANTIATE_TEST_SUITE_P(Rows, BatchInvariance,
                         ::testing::Combine(::testing::ValuesIn(BatchInvariantRows()),
                                            ::testing::ValuesIn(Shapes())),
                         ParamName);
INSTANTIATE_TEST_SUITE_P(Layers, RowsOfOneLayout, ::testing::ValuesIn(LayerShapes()), LayerName);
INSTANTIATE_TEST_SUITE_P(Rows, DequantizeConformance,
                         ::testing::Combine(::testing::ValuesIn(RowsOf(Op::kDequantize)),
                                            ::testing::ValuesIn(Shapes())),
                         ParamName);

}  // namespace
}  // namespace awqd::testing
