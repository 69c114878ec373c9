// The slab rule of the dense path on invented devices. Needs no GPU.
#include "gtest/gtest.h"
#include "kernels/base/math.h"
#include "kernels/cuda/dense/matmul.h"

namespace awqd::dense {
namespace {

DeviceInfo Gpu(int arch, int sms, int64_t l2_mib) {
  DeviceInfo info;
  info.kind = DeviceKind::kCuda;
  info.arch = arch;
  info.sm_count = sms;
  info.l2_bytes = l2_mib << 20;
  return info;
}

WeightShape Shape(int64_t k, int64_t n) {
  WeightShape shape;
  shape.k = k;
  shape.n = n;
  shape.scheme = Asymmetric(4, 0);
  return shape;
}

TEST(SlabsTest, EveryShapeFitsItsWorkspaceAndCoversN) {
  for (const DeviceInfo& gpu : {Gpu(90, 132, 50), Gpu(80, 108, 40), Gpu(86, 28, 2)}) {
    for (const int64_t k : {32, 64, 96, 4096, 14336, 29568, 1 << 20, 1 << 24}) {
      for (const int64_t n : {8, 64, 72, 128, 200, 4096, 28672, 57344}) {
        const WeightShape shape = Shape(k, n);
        const Workspace space = PlanWorkspace(shape, gpu);
        EXPECT_EQ(space.scratch_offset() % 256, 0);
        EXPECT_EQ(space.blas_offset() % 256, 0);
        for (const DType x : {DType::kFp16, DType::kBf16, DType::kFp32}) {
          for (const int64_t m : {1, 255, 256, 1000, 4097, 100000}) {
            const int64_t columns = SlabColumns(m, shape, x, gpu);
            ASSERT_GE(columns, 8);
            ASSERT_LE(columns, n);
            ASSERT_EQ(columns % 8, 0);
            ASSERT_LE(columns * k * SlabBytesPerWeight(x), space.slab_bytes);
            const int64_t rows = ScratchRows(m, columns);
            ASSERT_GE(rows, 1);
            ASSERT_LE(rows, m);
            ASSERT_LE(rows * columns * 4, space.scratch_bytes);
          }
        }
      }
    }
  }
}

TEST(SlabsTest, ManyTokensKeepTheSlabInL2) {
  const DeviceInfo gpu = Gpu(90, 132, 50);
  EXPECT_EQ(SlabColumns(4096, Shape(4096, 28672), DType::kFp16, gpu), 2048);
  EXPECT_EQ(SlabColumns(2048, Shape(14336, 4096), DType::kFp16, gpu), 1024);
  EXPECT_EQ(SlabColumns(4096, Shape(4096, 4096), DType::kFp16, gpu), 4096) << "fits whole";
  EXPECT_EQ(SlabColumns(4096, Shape(4096, 28672), DType::kFp16, Gpu(86, 28, 2)), 512);
}

TEST(SlabsTest, FewTokensGetAsFewSlabsAsThereIsRoomFor) {
  const DeviceInfo gpu = Gpu(90, 132, 50);
  EXPECT_EQ(SlabColumns(256, Shape(14336, 4096), DType::kFp16, gpu), 4096);
  EXPECT_EQ(SlabColumns(256, Shape(4096, 28672), DType::kFp16, gpu), 14336);
  EXPECT_LE(SlabColumns(256, Shape(8192, 57344), DType::kFp16, gpu) * 8192 * 2, int64_t{128} << 20);
}

TEST(SlabsTest, BetweenFewAndManyASlabFillsTheGpuEvenly) {
  const DeviceInfo gpu = Gpu(90, 132, 50);
  for (const int64_t m : {512, 1024, 2047}) {
    EXPECT_EQ(SlabColumns(m, Shape(4096, 28672), DType::kFp16, gpu), 4096) << m;
    EXPECT_EQ(SlabColumns(m, Shape(14336, 4096), DType::kFp16, gpu), 4096) << m;
  }
}

TEST(SlabsTest, SlabsAreEven) {
  const int64_t n = 28672;
  const int64_t columns = SlabColumns(4096, Shape(4096, n), DType::kFp16, Gpu(90, 132, 50));
  const int64_t last = n - (CeilDiv(n, columns) - 1) * columns;
  EXPECT_GE(last * 2, columns);
}

}  // namespace
}  // namespace awqd::dense
