// The order of sums on invented devices.
#include "kernels/cuda/common/chains.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "kernels/base/math.h"
#include "tests/kernels/cuda/gpus.h"

namespace awqd::cuda {
namespace {

WeightShape Weight(int64_t k, int64_t n) { return {k, n, {}}; }

TEST(MatmulChains, FillTheDeviceWithTheFewestBlocks) {
  EXPECT_EQ(MatmulChains(Weight(4096, 28672), H100()), (Chains{1, 2, 16}));
  EXPECT_EQ(MatmulChains(Weight(8192, 10240), H100()), (Chains{2, 2, 16}));
  EXPECT_EQ(MatmulChains(Weight(4096, 4096), H100()), (Chains{2, 2, 8}));
  EXPECT_EQ(MatmulChains(Weight(14336, 4096), H100()), (Chains{2, 4, 14}));
  EXPECT_EQ(MatmulChains(Weight(14336, 1024), H100()).split, 8);
  EXPECT_EQ(MatmulChains(Weight(14336, 64), H100()).split, 8) << "the largest cluster";
}

TEST(MatmulChains, AreFourInOneBlockWhereThatFillsTheDevice) {
  EXPECT_EQ(MatmulChains(Weight(4096, 6144), H100()), (Chains{1, 4, 8}));
  EXPECT_EQ(MatmulChains(Weight(8192, 8192), H100()), (Chains{1, 4, 16}));
  EXPECT_EQ(MatmulChains(Weight(2048, 8192), H100()).per_block, 2) << "they would be too short";
  EXPECT_EQ(MatmulChains(Weight(8192, 8192), Gpu(86, 84, 101376)).per_block, 2)
      << "shared memory does not hold four rings";
}

TEST(MatmulChains, KeepBlocksLongEnough) {
  EXPECT_EQ(MatmulChains(Weight(128, 64), H100()), (Chains{1, 2, 1}));
  EXPECT_EQ(MatmulChains(Weight(1024, 64), H100()), (Chains{2, 2, 2}));
}

TEST(MatmulChains, NeedClustersForMoreThanOneBlock) {
  EXPECT_EQ(MatmulChains(Weight(14336, 64), Gpu(80, 108, 166912)).split, 1);
}

TEST(MatmulChains, CoverK) {
  for (const int64_t k : {1, 128, 129, 1000, 4096, 11008, 28672}) {
    for (const int64_t n : {8, 4096, 6144, 8192, 28672}) {
      const Chains chains = MatmulChains(Weight(k, n), H100());
      EXPECT_GE(chains.count() * chains.length, CeilDiv(k, kRecordK)) << k << " x " << n;
      EXPECT_LT(chains.length, CeilDiv(k, kRecordK) / chains.count() + 1.0 + 1e-9)
          << k << " x " << n;
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
