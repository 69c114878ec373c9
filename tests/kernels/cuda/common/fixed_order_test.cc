// The order of sums on invented devices.
#include "kernels/cuda/common/fixed_order.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "kernels/base/math.h"
#include "tests/kernels/cuda/gpus.h"

namespace awqd::cuda {
namespace {

WeightShape Weight(int64_t k, int64_t n) { return {k, n, {}}; }

TEST(ChooseFixedOrder, FillTheDeviceWithTheFewestBlocks) {
  EXPECT_EQ(ChooseFixedOrder(Weight(4096, 28672), H100()), (FixedOrder{1, 2, 16}));
  EXPECT_EQ(ChooseFixedOrder(Weight(8192, 10240), H100()), (FixedOrder{2, 2, 16}));
  EXPECT_EQ(ChooseFixedOrder(Weight(4096, 4096), H100()), (FixedOrder{2, 2, 8}));
  EXPECT_EQ(ChooseFixedOrder(Weight(14336, 4096), H100()), (FixedOrder{2, 4, 14}));
  EXPECT_EQ(ChooseFixedOrder(Weight(14336, 1024), H100()).splits, 8);
  EXPECT_EQ(ChooseFixedOrder(Weight(14336, 64), H100()).splits, 8) << "the largest cluster";
}

TEST(ChooseFixedOrder, AreFourInOneBlockWhereThatFillsTheDevice) {
  EXPECT_EQ(ChooseFixedOrder(Weight(4096, 6144), H100()), (FixedOrder{1, 4, 8}));
  EXPECT_EQ(ChooseFixedOrder(Weight(8192, 8192), H100()), (FixedOrder{1, 4, 16}));
  EXPECT_EQ(ChooseFixedOrder(Weight(2048, 8192), H100()).per_block, 2) << "they would be too short";
  EXPECT_EQ(ChooseFixedOrder(Weight(8192, 8192), Gpu(86, 84, 101376)).per_block, 2)
      << "shared memory does not hold four rings";
}

TEST(ChooseFixedOrder, KeepBlocksLongEnough) {
  EXPECT_EQ(ChooseFixedOrder(Weight(128, 64), H100()), (FixedOrder{1, 2, 1}));
  EXPECT_EQ(ChooseFixedOrder(Weight(1024, 64), H100()), (FixedOrder{2, 2, 2}));
}

TEST(ChooseFixedOrder, NeedClustersForMoreThanOneBlock) {
  EXPECT_EQ(ChooseFixedOrder(Weight(14336, 64), Gpu(80, 108, 166912)).splits, 1);
}

TEST(ChooseFixedOrder, CoverK) {
  for (const int64_t k : {1, 128, 129, 1000, 4096, 11008, 28672}) {
    for (const int64_t n : {8, 4096, 6144, 8192, 28672}) {
      const FixedOrder k_ranges = ChooseFixedOrder(Weight(k, n), H100());
      EXPECT_GE(k_ranges.count() * k_ranges.length, CeilDiv(k, kRecordK)) << k << " x " << n;
      EXPECT_LT(k_ranges.length, CeilDiv(k, kRecordK) / k_ranges.count() + 1.0 + 1e-9)
          << k << " x " << n;
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
