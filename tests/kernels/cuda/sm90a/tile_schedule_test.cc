// The work of each block in a tile: every block has work, a multiprocessor and room for its sums.
#include <gtest/gtest.h>

#include <utility>

#include "kernels/cuda/common/fixed_order.h"
#include "kernels/cuda/sm90a/tiles.h"
#include "tests/kernels/cuda/gpus.h"
#include "tests/kernels/cuda/sm90a/shapes.h"

namespace awqd::cuda {
namespace {

// More blocks would run in two waves.
TEST(PersistentTilesTest, ABlockHasAMultiprocessorToItself) {
  const DeviceInfo device = H100();
  for (DType x : {DType::kFp16, DType::kBf16}) {
    for (int64_t m : {17, 24, 32, 33, 48, 64, 65, 96, 128, 256}) {
      for (const auto& [k, n] : {std::pair{4096, 4096},
                                 {4096, 6144},
                                 {14336, 4096},
                                 {4096, 28672},
                                 {8192, 8192},
                                 {8192, 10240},
                                 {28672, 8192},
                                 {8192, 57344},
                                 {5120, 13824},
                                 {3584, 4608}}) {
        const PersistentTile tile = ChoosePersistentTile(Shape(k, n), m, device, x);
        const StreamKSchedule s = PersistentSchedule(Shape(k, n), m, tile, device);
        EXPECT_LE(s.clusters * tile.cluster, device.sm_count) << k << " x " << n << ", M " << m;
        const PersistentTile fixed_order = ChooseFixedOrderTile(Shape(k, n), m, device, x);
        EXPECT_LE(
            FixedOrderSchedule(Shape(k, n), m, fixed_order, device).clusters * fixed_order.cluster,
            device.sm_count)
            << k << " x " << n << ", M " << m;
      }
    }
  }
}

TEST(PersistentTilesTest, SharesAreEvenWhereThatLeavesFewMultiprocessorsIdle) {
  const PersistentTile tile{128, 2, 1};
  const StreamKSchedule whole = PersistentSchedule(Shape(4096, 4096), 512, tile, H100());
  EXPECT_EQ(whole.clusters, 128);
  EXPECT_EQ(whole.rounds, 1);
  EXPECT_EQ(whole.stream_k_tiles, 0);
  const StreamKSchedule quarters = PersistentSchedule(Shape(4096, 4096), 128, tile, H100());
  EXPECT_EQ(quarters.clusters, 128);
  EXPECT_EQ(quarters.stream_k_tiles, 32);
  // 48 tiles: two parts each would leave 36 of 132 multiprocessors idle; 1792 tiles: only the last
  // of 14 rounds is cut.
  EXPECT_EQ(PersistentSchedule(Shape(4096, 6144), 128, tile, H100()).clusters, 132);
  EXPECT_EQ(PersistentSchedule(Shape(4096, 28672), 1024, tile, H100()).clusters, 132);
}

TEST(PersistentTilesTest, KRangesAreSplitOnlyWhereTilesAreMany) {
  for (const PersistentTile& tile : FixedOrderTiles(Shape(4096, 4096))) {
    for (int64_t m : {17, 64, 128, 300, 1024, 4096}) {
      for (const auto& [k, n] :
           {std::pair{32, 8}, {128, 64}, {1280, 1096}, {4096, 4096}, {11008, 4096}, {96, 28672}}) {
        const int k_range = ChooseFixedOrder(Shape(k, n), H100()).length;
        if (tile.splits > 1) continue;
        const StreamKSchedule s = FixedOrderSchedule(Shape(k, n), m, tile, H100());
        EXPECT_LE(s.clusters * tile.cluster, 132);
        if (s.splits > 0) {
          EXPECT_EQ(s.split_steps % k_range, 0);
          EXPECT_LT((s.splits - 1) * s.split_steps, s.k_blocks) << "a part without a step";
          EXPECT_GE(s.splits * s.split_steps, s.k_blocks);
        } else {
          EXPECT_GE(s.tiles(), s.clusters);
        }
        const int slots = FixedOrderSlots(s, k_range, tile);
        EXPECT_LE(s.clusters * tile.cluster * tile.records * slots, kStreamCounters);
        EXPECT_LE(s.clusters * slots * PersistentSlotFloats(tile) * tile.cluster * 4,
                  FixedOrderSumsBytes(Shape(k, n), H100()));
      }
    }
  }
}

TEST(PersistentTilesTest, ChosenSplitsHaveRoomForTheKRangesThatTheyStore) {
  int stored = 0;
  for (const auto& [k, n] :
       {std::pair{1280, 1096}, {4096, 6144}, {8192, 10240}, {11008, 4096}, {14336, 4096}}) {
    const WeightShape shape = Shape(k, n);
    const int k_range = ChooseFixedOrder(shape, H100()).length;
    for (int64_t m = 17; m < 600; ++m) {
      const PersistentTile tile = ChooseFixedOrderTile(shape, m, H100());
      if (tile.accumulators > 0) continue;
      ++stored;
      const StreamKSchedule s = FixedOrderSchedule(shape, m, tile, H100());
      EXPECT_LE(s.clusters, 132);
      EXPECT_EQ(s.splits, 2);
      EXPECT_EQ(s.split_steps % k_range, 0);
      EXPECT_GE(s.split_steps, 2 * k_range);
      EXPECT_LT(s.split_steps, s.k_blocks) << "a part without a step";
      EXPECT_GE(2 * s.split_steps, s.k_blocks);
      const int slots = FixedOrderSlots(s, k_range, tile);
      EXPECT_LE(s.clusters * tile.records * slots, kStreamCounters);
      EXPECT_LE(s.clusters * slots * PersistentSlotFloats(tile) * 4,
                FixedOrderSumsBytes(shape, H100()));
    }
  }
  EXPECT_GT(stored, 0);
}

TEST(PersistentTilesTest, EveryPartOfAChosenTileHasAStep) {
  for (int64_t m : {1, 17, 64, 100, 256, 1000}) {
    for (int64_t k = 16; k < 30000; k += k < 2000 ? 128 : 4096) {
      for (int64_t n : {8, 64, 4096, 6144, 8192, 10240}) {
        const WeightShape shape = Shape(k, n);
        const PersistentTile tile = ChoosePersistentTile(shape, m, H100());
        const StreamKSchedule s = PersistentSchedule(shape, m, tile, H100());
        const PersistentTile kept = ChooseFixedOrderTile(shape, m, H100());
        const StreamKSchedule in_order = FixedOrderSchedule(shape, m, kept, H100());
        const int k_range = ChooseFixedOrder(shape, H100()).length;
        if (tile.splits > 1) {
          ASSERT_EQ(s.splits, tile.splits);
          ASSERT_GE(s.splits * s.split_steps, s.k_blocks);
          // The last slice of the last part.
          const int slice_steps = (s.split_steps + tile.slices - 1) / tile.slices;
          ASSERT_LT((s.splits - 1) * s.split_steps + (tile.slices - 1) * slice_steps, s.k_blocks)
              << k << " " << n << " " << m;
        }
        if (kept.splits > 1) {
          // All k-ranges have a step each, if they stay in registers.
          const int each = in_order.split_steps / k_range;
          ASSERT_EQ(each * k_range, in_order.split_steps);
          if (kept.accumulators > 0) {
            ASSERT_EQ(each, kept.accumulators * kept.slices);
          }
          const int others =
              kept.accumulators > 0 ? kept.splits * each - 1 : (kept.splits - 1) * each;
          ASSERT_LT(others * k_range, in_order.k_blocks) << k << " " << n << " " << m;
          ASSERT_GE(kept.splits * each * k_range, in_order.k_blocks);
        }
      }
    }
  }
}

TEST(PersistentTilesTest, EveryClusterOfACutTileHasWork) {
  for (const PersistentTile& tile : PersistentTiles(Shape(4096, 4096))) {
    for (int64_t m : {1, 64, 257, 4096}) {
      for (const auto& [k, n] : {std::pair{32, 8}, {128, 64}, {4096, 4096}, {96, 28672}}) {
        const StreamKSchedule s = PersistentSchedule(Shape(k, n), m, tile, H100());
        if (tile.splits > 1) {
          EXPECT_EQ(s.clusters, s.tiles() * tile.splits);
          continue;
        }
        EXPECT_GE(s.tiles() * s.k_blocks, s.clusters);
        EXPECT_LE(s.clusters * tile.cluster, 132);
        EXPECT_LE(s.clusters * tile.cluster * tile.records, kStreamCounters);
      }
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
