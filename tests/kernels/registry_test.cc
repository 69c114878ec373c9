// Select with invented devices and rows: refusals, priorities, token ranges, one layout.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/layouts/layout.h"
#include "kernels/plan/plan.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;

KernelRow Row(absl::string_view name, Op op, const Layout* layout, int priority) {
  KernelRow row;
  row.name = name;
  row.op = op;
  row.layout = layout;
  row.priority = priority;
  row.claims.bits = 1u << 4;
  return row;
}

class SelectTest : public ::testing::Test {
 protected:
  SelectTest() {
    shape_.k = 256;
    shape_.n = 64;
    shape_.scheme = Asymmetric(4, 128);
    cuda_.kind = DeviceKind::kCuda;
    cuda_.id = "cuda:0";
    cuda_.arch = 90;
  }

  WeightShape shape_;
  DeviceInfo cpu_, cuda_;
  KernelRow dequantize_ = Row("a/dequantize", Op::kDequantize, &kPlainLayout, 0);
  KernelRow small_ = Row("a/small", Op::kMatmul, &kPlainLayout, 5);
  KernelRow any_ = Row("a/any", Op::kMatmul, &kPlainLayout, 1);
};

TEST_F(SelectTest, HighestPriorityWinsWithinItsTokens) {
  small_.max_m = 16;
  const KernelRow* rows[] = {&any_, &small_, &dequantize_};
  const auto plan = Select(shape_, cpu_, rows);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->rows.Matmul(Path::kFused, 1), &small_);
  EXPECT_EQ(plan->rows.Matmul(Path::kFused, 16), &small_);
  EXPECT_EQ(plan->rows.Matmul(Path::kFused, 17), &any_);
  EXPECT_EQ(plan->rows.Matmul(Path::kFused, 1 << 30), &any_);
  EXPECT_EQ(plan->rows.Matmul(Path::kDequantize, 17), nullptr);
  EXPECT_EQ(plan->rows.dequantize, &dequantize_);
  EXPECT_THAT(Explain(*plan, shape_, cpu_), HasSubstr("a/small"));
}

TEST_F(SelectTest, IntegersHaveARowOfTheirOwn) {
  KernelRow integers = Row("a/integers", Op::kIntegerMatmul, &kPlainLayout, 99);
  const KernelRow* rows[] = {&integers, &any_, &dequantize_};
  auto plan = Select(shape_, cpu_, rows);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->rows.Integer(1), nullptr);
  ASSERT_EQ(plan->rows.refused.size(), 1u);
  EXPECT_EQ(plan->rows.refused[0].reason, "the weight has scales: w4g128z");
  shape_.scheme.scale_dtype.reset();
  plan = Select(shape_, cpu_, rows);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->rows.Integer(5000), &integers);
  EXPECT_EQ(plan->rows.Matmul(Path::kFused, 1), &any_) << "whatever its priority";
  EXPECT_THAT(Explain(*plan, shape_, cpu_), HasSubstr("INT8 M >= 1: a/integers"));
}

TEST_F(SelectTest, E4m3ActivationsMayHaveNoRow) {
  KernelRow float8 = Row("a/float8", Op::kFloat8Activations, &kPlainLayout, 99);
  const KernelRow* rows[] = {&any_, &dequantize_, &float8};
  auto plan = Select(shape_, cpu_, absl::MakeConstSpan(rows).first(2));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->rows.Float8(1), nullptr);
  EXPECT_THAT(Explain(*plan, shape_, cpu_), HasSubstr("E4M3 activations: rounded, then as others"));
  plan = Select(shape_, cpu_, rows);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->rows.Float8(1), &float8);
  EXPECT_THAT(Explain(*plan, shape_, cpu_), HasSubstr("E4M3 activations M >= 1: a/float8"));
}

TEST_F(SelectTest, QuantisedActivationsHaveARowOfTheirOwn) {
  KernelRow quantized = Row("a/quantized", Op::kQuantizedActivations, &kPlainLayout, 99);
  quantized.claims = kIntegerCodes;
  const KernelRow* rows[] = {&quantized, &any_, &dequantize_};
  auto plan = Select(shape_, cpu_, rows);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->rows.Quantized(1), &quantized);
  EXPECT_EQ(plan->rows.Quantized(5000), &quantized);
  EXPECT_EQ(plan->rows.Integer(1), nullptr);
  EXPECT_EQ(plan->rows.Matmul(Path::kFused, 1), &any_) << "whatever its priority";
  EXPECT_THAT(Explain(*plan, shape_, cpu_), HasSubstr("quantised activations M >= 1: a/quantized"));
  shape_.scheme = ParseScheme("e2m1g32").value();
  EXPECT_EQ(WhyNoQuantizedActivations(shape_), "codes are no integers: e2m1g32");
  quantized.claims = kEverything;
  EXPECT_EQ(WhyNot(quantized, shape_, cpu_), "codes are no integers: e2m1g32");
}

TEST(WhyNoIntegers, NamesThePart) {
  const auto why = [](const char* scheme, int64_t k) {
    return WhyNoIntegers({.k = k, .n = 8, .scheme = ParseScheme(scheme).value()});
  };
  EXPECT_EQ(why("w4g128z+1", 4096), "");
  EXPECT_EQ(why("w4cz", 4096), "the weight has scales: w4cz");
  EXPECT_EQ(why("w4cz+1*t", 4096), "the weight has scales: w4cz+1*t");
  EXPECT_EQ(why("w4cr+1", 4096), "codes and zeros are no integers: w4cr+1");
  EXPECT_EQ(why("e2m1c+1", 4096), "codes and zeros are no integers: e2m1c+1");
  // 128 * 255 * 65793 = 2^31 - 1 - 128.
  EXPECT_EQ(why("w8c+1", 65793), "");
  EXPECT_EQ(why("w8c+1", 65794), "sums of w8c+1 may pass INT32 from K = 65794 on, got 65794");
  EXPECT_EQ(why("w8cz+1", 65794), "sums of w8cz+1 may pass INT32 from K = 65794 on, got 65794");
  // |code - zero| is at most 128.
  EXPECT_EQ(why("w8cs+1", 131071), "");
  EXPECT_EQ(why("w8cs+1", 131072), "sums of w8cs+1 may pass INT32 from K = 131072 on, got 131072");
  EXPECT_EQ(why("w1c+1", 1 << 24),
            "sums of w1c+1 may pass INT32 from K = 16777216 on, got 16777216");
}

TEST_F(SelectTest, SaysHowAKernelCutsTheProduct) {
  const auto tiles = [](int64_t min_m, int64_t max_m, const KernelRow& row) {
    return DescribeTiles({Path::kFused, min_m, max_m, &row}, {}, {});
  };
  small_.tile = [](const WeightShape&, const DeviceInfo&, int64_t m) {
    return std::string(m <= 32 ? "narrow" : m < 4096 ? "wide" : "widest");
  };
  EXPECT_EQ(tiles(17, -1, small_), "17-32: narrow, 64-2048: wide, 4096: widest");
  EXPECT_EQ(tiles(0, 40, small_), "1-32: narrow");
  EXPECT_EQ(tiles(64, 64, small_), "64: wide");
  EXPECT_EQ(tiles(5000, -1, small_), "");
  EXPECT_EQ(tiles(1, -1, any_), "");
  const KernelRow* rows[] = {&small_, &dequantize_};
  EXPECT_THAT(Explain(*Select(shape_, cpu_, rows), shape_, cpu_),
              HasSubstr("a/small (1-32: narrow, 64-2048: wide, 4096: widest)"));
}

TEST_F(SelectTest, APriorityMayCountFromACountOfTokensOnThatDependsOnTheWeight) {
  KernelRow fast = Row("a/fast", Op::kMatmul, small_.layout, 99);
  fast.min_m = 9;
  fast.preferred_from = [](const WeightShape& shape, const DeviceInfo&) -> int64_t {
    return shape.n > 1000 ? 9 : 17;
  };
  small_.max_m = -1;
  const auto row = [&](int64_t n, int64_t m) {
    const KernelRow* rows[] = {&fast, &small_, &dequantize_};
    WeightShape shape = shape_;
    shape.n = n;
    return Select(shape, cpu_, rows)->rows.Matmul(Path::kFused, m);
  };
  EXPECT_EQ(row(1024, 8), &small_);
  EXPECT_EQ(row(1024, 9), &fast);
  EXPECT_EQ(row(64, 16), &small_);
  EXPECT_EQ(row(64, 17), &fast);
  // Alone it serves every count.
  const KernelRow* rows[] = {&fast, &dequantize_};
  const auto plan = Select(shape_, cpu_, rows);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->rows.Matmul(Path::kFused, 9), &fast);
  EXPECT_EQ(plan->rows.Matmul(Path::kFused, 8), nullptr);
}

TEST_F(SelectTest, ALayoutThatCannotDequantizeIsNotChosen) {
  const KernelRow fast = Row("b/fast", Op::kMatmul, &kK16Layout, 99);
  const KernelRow* rows[] = {&any_, &fast, &dequantize_};
  const auto plan = Select(shape_, cpu_, rows);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->layout, &kPlainLayout);
  ASSERT_EQ(plan->rows.refused.size(), 1u);
  EXPECT_EQ(plan->rows.refused[0].name, "b/fast");
  EXPECT_THAT(plan->rows.refused[0].reason, HasSubstr("k16"));
}

TEST_F(SelectTest, AmongEqualProductsTheBetterDequantizeChoosesTheLayout) {
  const KernelRow dense = Row("dense", Op::kMatmul, nullptr, 0);
  const KernelRow fast = Row("b/dequantize", Op::kDequantize, &kK16Layout, 10);
  const KernelRow* rows[] = {&dense, &dequantize_, &fast};
  const auto plan = Select(shape_, cpu_, rows);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->layout, &kK16Layout);
  EXPECT_EQ(plan->rows.dequantize, &fast);
}

TEST_F(SelectTest, ARowForForcingStepsAsideForAnother) {
  KernelRow oracle = Row("oracle", Op::kMatmul, nullptr, -1);
  const KernelRow* with[] = {&oracle, &any_, &dequantize_};
  EXPECT_EQ(Select(shape_, cpu_, with)->rows.Matmul(Path::kFused, 1), &any_);
  const KernelRow* alone[] = {&oracle, &dequantize_};
  EXPECT_EQ(Select(shape_, cpu_, alone)->rows.Matmul(Path::kFused, 1), &oracle);
}

TEST_F(SelectTest, ABatchInvariantDeviceTakesOnlyRowsThatAre) {
  any_.batch_invariant = true;
  cpu_.batch_invariant = true;
  const KernelRow* rows[] = {&any_, &small_, &dequantize_};
  const auto plan = Select(shape_, cpu_, rows);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->rows.Matmul(Path::kFused, 1), &any_);
  EXPECT_THAT(Explain(*plan, shape_, cpu_),
              HasSubstr("refused a/small: its sums depend on the batch"));
  // A dequantize sums nothing.
  EXPECT_EQ(plan->rows.dequantize, &dequantize_);
}

TEST_F(SelectTest, NoRowIsUnimplementedWithEveryReason) {
  shape_.scheme.bits = 8;
  const KernelRow* rows[] = {&any_, &dequantize_};
  const auto plan = Select(shape_, cpu_, rows);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(plan.status().ToString(), HasSubstr("a/any: has no 8-bit codes"));
  EXPECT_THAT(plan.status().ToString(), HasSubstr("a/dequantize"));
}

TEST_F(SelectTest, WhyNotSaysWhatIsMissing) {
  EXPECT_EQ(WhyNot(any_, shape_, cpu_), "");
  EXPECT_THAT(WhyNot(any_, shape_, cuda_), HasSubstr("CPU only"));
  KernelRow row = any_;
  row.device = DeviceKind::kCuda;
  EXPECT_THAT(WhyNot(row, shape_, cpu_), HasSubstr("CUDA"));
  row.min_arch = 100;
  EXPECT_THAT(WhyNot(row, shape_, cuda_), HasSubstr("sm_100"));
  row.min_arch = 0;
  row.max_arch = 80;
  EXPECT_THAT(WhyNot(row, shape_, cuda_), HasSubstr("sm_80"));
  row = any_;
  row.claims.group_multiple = 100;
  EXPECT_THAT(WhyNot(row, shape_, cpu_), HasSubstr("group size 128"));
  row = any_;
  row.claims.zeros = MaskOf(ZeroKind::kConstant);
  EXPECT_THAT(WhyNot(row, shape_, cpu_), HasSubstr("zero points"));
  row = any_;
  row.claims.scales = MaskOf(DType::kBf16);
  EXPECT_THAT(WhyNot(row, shape_, cpu_), HasSubstr("FP16 scales"));
}

}  // namespace
}  // namespace awqd
