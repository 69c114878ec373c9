// The cost model that tiles are chosen by.
#include "kernels/cuda/sm90a/tile_costs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/common/stream_k_schedule.h"
#include "kernels/cuda/sm90a/tile_list.h"
#include "tests/kernels/cuda/gpus.h"

namespace awqd::cuda {
namespace {

int ClustersOfTile(const StreamKSchedule& s) {
  std::vector<int> clusters(s.tiles());
  for (int cluster = 0; cluster < s.clusters; ++cluster) {
    WorkUnits units(s, cluster);
    for (WorkUnit work; units.Next(&work);) ++clusters[work.tile];
  }
  return *std::max_element(clusters.begin(), clusters.end());
}

// With many steps, a run that ends at a whole step is as good as its fraction.
TEST(TileCostTest, KnowsHowManyClustersMeetInATile) {
  for (int tiles : {1, 2, 3, 22, 32, 48, 54, 64, 66, 88, 131, 132, 133, 144, 160, 224, 264, 1792}) {
    for (int clusters : {66, 132}) {
      const StreamKSchedule s = MakeStreamKSchedule(tiles, 1000, clusters);
      if (s.stream_k_tiles == 0) continue;
      EXPECT_EQ(MostClustersOfTile(s), ClustersOfTile(s)) << tiles << " on " << clusters;
    }
  }
}

// A step with more tokens takes longer, but at most in proportion; within the measured range.
TEST(TileCostTest, StepsGrowWithTilesAndNoFaster) {
  for (const TileCost& a : kFreeTiles4) {
    for (const TileCost& b : kFreeTiles4) {
      const PersistentTile wider{b.tile.tokens, a.tile.records,      a.tile.cluster,
                                 a.tile.splits, a.tile.accumulators, a.tile.slices};
      if (!(b.tile == wider) || b.tile.tokens <= a.tile.tokens) continue;
      EXPECT_GT(b.fp16_us, 0.98 * a.fp16_us) << a.tile.tokens << " " << b.tile.tokens;
      EXPECT_LT(b.fp16_us / b.tile.tokens, 1.05 * a.fp16_us / a.tile.tokens)
          << a.tile.tokens << " " << b.tile.tokens << " x " << a.tile.records;
    }
  }
}

constexpr int kRecordBytes = 4256;  // 4 bits, groups of 128

double Us(const StreamKSchedule& s, const TileCost& cost, DType x) {
  return Microseconds(s, cost, x, kRecordBytes, SpeedOf(H100()));
}

TEST(TileCostTest, WhatIsCutCostsMoreThanWhatIsWhole) {
  const TileCost tile{{128, 2, 1}, 0.7, 0.8};
  const double whole = Us(MakeStreamKSchedule(132, 32, 132), tile, DType::kFp16);
  EXPECT_LT(whole, Us(MakeStreamKSchedule(131, 32, 132), tile, DType::kFp16));
  EXPECT_NEAR(whole, 32 * 0.7 + kStartUs + StoreUs(2), 1e-9);
  // Half as many tiles have half the steps and a cut each.
  EXPECT_NEAR(Us(MakeStreamKSchedule(66, 32, 132), tile, DType::kBf16),
              16 * 0.8 + kStartUs + StoreUs(2) / 2 + StorePartialsUs(2) + LoadPartialsUs(2), 1e-9);
}

// Peaks as drivers report them.
DeviceInfo WithPeaks(int64_t clock_khz, int64_t bytes_per_s) {
  DeviceInfo out = H100();
  out.sm_clock_khz = clock_khz;
  out.memory_bytes_per_s = bytes_per_s;
  return out;
}

double StepOn(const DeviceInfo& device, const TileCost& cost) {
  const int clusters = device.sm_count / cost.tile.cluster;  // all multiprocessors are busy
  return StepUs(MakeStreamKSchedule(clusters, 32, clusters), cost, DType::kFp16, kRecordBytes,
                SpeedOf(device));
}

TEST(TileCostTest, AnH100TakesWhatWasFitted) {
  const DeviceInfo h100 = WithPeaks(1'980'000, 3'352'000'000'000);
  for (const TileCost& cost : kFreeTiles4) {
    EXPECT_DOUBLE_EQ(StepOn(h100, cost), cost.fp16_us);
    EXPECT_DOUBLE_EQ(StepOn(H100(), cost), cost.fp16_us);  // a driver that reports nothing
  }
}

TEST(TileCostTest, FasterMemoryMakesNoStepFaster) {
  const DeviceInfo h200 = WithPeaks(1'980'000, 4'917'000'000'000);
  for (const TileCost& cost : kFreeTiles4) EXPECT_DOUBLE_EQ(StepOn(h200, cost), cost.fp16_us);
}

TEST(TileCostTest, SlowerMemoryBoundsNarrowTilesAlone) {
  const DeviceInfo pcie = WithPeaks(1'980'000, 2'000'000'000'000);
  const TileCost narrow{{32, 2, 1, 2, 1, 2}, 0.395, 0.443}, wide{{256, 2, 2}, 1.308, 1.267};
  // 132 blocks with two records each.
  EXPECT_NEAR(StepOn(pcie, narrow), 132 * 2 * kRecordBytes / (0.9 * 2'000'000), 1e-3);
  EXPECT_DOUBLE_EQ(StepOn(pcie, wide), 1.308);
}

TEST(TileCostTest, ASlowerClockMakesAllSlower) {
  const TileCost wide{{256, 2, 2}, 1.308, 1.267};
  EXPECT_NEAR(StepOn(WithPeaks(990'000, 3'352'000'000'000), wide), 2 * 1.308, 1e-9);
}

}  // namespace
}  // namespace awqd::cuda
