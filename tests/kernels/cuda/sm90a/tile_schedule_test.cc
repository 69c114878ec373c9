// The work of each block in a tile: every block has work, a multiprocessor and room for its sums.
#include <gtest/gtest.h>

#include <utility>

#include "kernels/cuda/common/chains.h"
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
        const Schedule s = PersistentSchedule(Shape(k, n), m, tile, device);
        EXPECT_LE(s.clusters * tile.cluster, device.sm_count) << k << " x " << n << ", M " << m;
        const PersistentTile chained = ChooseChainedTile(Shape(k, n), m, device, x);
        EXPECT_LE(ChainedSchedule(Shape(k, n), m, chained, device).clusters * chained.cluster,
                  device.sm_count)
            << k << " x " << n << ", M " << m;
      }
    }
  }
}

TEST(PersistentTilesTest, SharesAreEvenWhereThatLeavesFewMultiprocessorsIdle) {
  const PersistentTile tile{128, 2, 1};
  const Schedule whole = PersistentSchedule(Shape(4096, 4096), 512, tile, H100());
  EXPECT_EQ(whole.clusters, 128);
  EXPECT_EQ(whole.rounds, 1);
  EXPECT_EQ(whole.split, 0);
  const Schedule quarters = PersistentSchedule(Shape(4096, 4096), 128, tile, H100());
  EXPECT_EQ(quarters.clusters, 128);
  EXPECT_EQ(quarters.split, 32);
  // 48 tiles: two parts each would leave 36 of 132 multiprocessors idle; 1792 tiles: only the last
  // of 14 rounds is cut.
  EXPECT_EQ(PersistentSchedule(Shape(4096, 6144), 128, tile, H100()).clusters, 132);
  EXPECT_EQ(PersistentSchedule(Shape(4096, 28672), 1024, tile, H100()).clusters, 132);
}

TEST(PersistentTilesTest, ChainsAreCutOnlyWhereTilesAreMany) {
  for (const PersistentTile& tile : ChainedTiles(Shape(4096, 4096))) {
    for (int64_t m : {17, 64, 128, 300, 1024, 4096}) {
      for (const auto& [k, n] :
           {std::pair{32, 8}, {128, 64}, {1280, 1096}, {4096, 4096}, {11008, 4096}, {96, 28672}}) {
        const int chain = MatmulChains(Shape(k, n), H100()).length;
        if (tile.parts > 1) continue;
        const Schedule s = ChainedSchedule(Shape(k, n), m, tile, H100());
        EXPECT_LE(s.clusters * tile.cluster, 132);
        if (s.parts > 0) {
          EXPECT_EQ(s.part_steps % chain, 0);
          EXPECT_LT((s.parts - 1) * s.part_steps, s.k_blocks) << "a part without a step";
          EXPECT_GE(s.parts * s.part_steps, s.k_blocks);
        } else {
          EXPECT_GE(s.tiles(), s.clusters);
        }
        const int slots = ChainedSlots(s, chain, tile);
        EXPECT_LE(s.clusters * tile.cluster * tile.records * slots, kStreamCounters);
        EXPECT_LE(s.clusters * slots * PersistentSlotFloats(tile) * tile.cluster * 4,
                  ChainedSumsBytes(Shape(k, n), H100()));
      }
    }
  }
}

TEST(PersistentTilesTest, PartsThatAreChosenHaveRoomForTheChainsThatTheyPutDown) {
  int put_down = 0;
  for (const auto& [k, n] :
       {std::pair{1280, 1096}, {4096, 6144}, {8192, 10240}, {11008, 4096}, {14336, 4096}}) {
    const WeightShape shape = Shape(k, n);
    const int chain = MatmulChains(shape, H100()).length;
    for (int64_t m = 17; m < 600; ++m) {
      const PersistentTile tile = ChooseChainedTile(shape, m, H100());
      if (tile.sets > 0) continue;
      ++put_down;
      const Schedule s = ChainedSchedule(shape, m, tile, H100());
      EXPECT_LE(s.clusters, 132);
      EXPECT_EQ(s.parts, 2);
      EXPECT_EQ(s.part_steps % chain, 0);
      EXPECT_GE(s.part_steps, 2 * chain);
      EXPECT_LT(s.part_steps, s.k_blocks) << "a part without a step";
      EXPECT_GE(2 * s.part_steps, s.k_blocks);
      const int slots = ChainedSlots(s, chain, tile);
      EXPECT_LE(s.clusters * tile.records * slots, kStreamCounters);
      EXPECT_LE(s.clusters * slots * PersistentSlotFloats(tile) * 4,
                ChainedSumsBytes(shape, H100()));
    }
  }
  EXPECT_GT(put_down, 0);
}

TEST(PersistentTilesTest, EveryPartOfAChosenTileHasAStep) {
  for (int64_t m : {1, 17, 64, 100, 256, 1000}) {
    for (int64_t k = 16; k < 30000; k += k < 2000 ? 128 : 4096) {
      for (int64_t n : {8, 64, 4096, 6144, 8192, 10240}) {
        const WeightShape shape = Shape(k, n);
        const PersistentTile tile = ChoosePersistentTile(shape, m, H100());
        const Schedule s = PersistentSchedule(shape, m, tile, H100());
        const PersistentTile kept = ChooseChainedTile(shape, m, H100());
        const Schedule in_order = ChainedSchedule(shape, m, kept, H100());
        const int chain = MatmulChains(shape, H100()).length;
        if (tile.parts > 1) {
          ASSERT_EQ(s.parts, tile.parts);
          ASSERT_GE(s.parts * s.part_steps, s.k_blocks);
          // The last slice of the last part.
          const int slice_steps = (s.part_steps + tile.slices - 1) / tile.slices;
          ASSERT_LT((s.parts - 1) * s.part_steps + (tile.slices - 1) * slice_steps, s.k_blocks)
              << k << " " << n << " " << m;
        }
        if (kept.parts > 1) {
          // All chains have a step each, if they stay in registers.
          const int each = in_order.part_steps / chain;
          ASSERT_EQ(each * chain, in_order.part_steps);
          if (kept.sets > 0) {
            ASSERT_EQ(each, kept.sets * kept.slices);
          }
          const int others = kept.sets > 0 ? kept.parts * each - 1 : (kept.parts - 1) * each;
          ASSERT_LT(others * chain, in_order.k_blocks) << k << " " << n << " " << m;
          ASSERT_GE(kept.parts * each * chain, in_order.k_blocks);
        }
      }
    }
  }
}

TEST(PersistentTilesTest, EveryClusterOfACutTileHasWork) {
  for (const PersistentTile& tile : PersistentTiles(Shape(4096, 4096))) {
    for (int64_t m : {1, 64, 257, 4096}) {
      for (const auto& [k, n] : {std::pair{32, 8}, {128, 64}, {4096, 4096}, {96, 28672}}) {
        const Schedule s = PersistentSchedule(Shape(k, n), m, tile, H100());
        if (tile.parts > 1) {
          EXPECT_EQ(s.clusters, s.tiles() * tile.parts);
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
