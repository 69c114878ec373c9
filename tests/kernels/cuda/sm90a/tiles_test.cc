// The persistent product's tiles fit the machine, whatever the problem.
#include "kernels/cuda/sm90a/tiles.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace awqd::cuda {
namespace {

DeviceInfo Hopper() {
  DeviceInfo info;
  info.kind = DeviceKind::kCuda;
  info.arch = 90;
  info.sm_count = 132;
  info.shared_bytes_per_block = 227 * 1024;
  return info;
}

WeightShape Shape(int64_t k, int64_t n) {
  WeightShape shape{k, n, {}};
  shape.scheme.group_size = 128;
  return shape;
}

TEST(PersistentTilesTest, TheRingsFitSharedMemoryAndAreAtLeastThreeDeep) {
  for (const PersistentTile& tile : PersistentTiles()) {
    for (bool fine : {false, true}) {
      const int bytes = PersistentSharedBytes(tile.tokens, tile.groups, tile.blocks, fine);
      // A block takes 1 KB for itself.
      EXPECT_LE(tile.blocks * (bytes + 1024), 228 * 1024);
      EXPECT_GE(PersistentStages(tile.tokens, tile.groups, tile.blocks, fine), 3);
    }
  }
}

TEST(PersistentTilesTest, TheChosenTileIsCompiled) {
  const std::vector<PersistentTile> tiles = PersistentTiles();
  for (int64_t m : {1, 17, 33, 64, 65, 128, 129, 256, 300, 1024, 4096, 100000}) {
    for (const auto& [k, n] : {std::pair{4096, 4096}, {14336, 4096}, {4096, 28672}, {32, 8}}) {
      const PersistentTile tile = ChoosePersistentTile(Shape(k, n), m, Hopper());
      EXPECT_EQ(std::count(tiles.begin(), tiles.end(), tile), 1) << m << " " << k;
    }
  }
}

TEST(PersistentTilesTest, FewTokensGetNarrowTilesAndManyWideOnes) {
  EXPECT_EQ(ChoosePersistentTile(Shape(4096, 4096), 17, Hopper()), (PersistentTile{32, 2, 1, 2}));
  EXPECT_EQ(ChoosePersistentTile(Shape(4096, 28672), 32, Hopper()), (PersistentTile{32, 3, 1, 2}));
  EXPECT_EQ(ChoosePersistentTile(Shape(4096, 28672), 64, Hopper()), (PersistentTile{64, 2, 1, 2}));
  EXPECT_EQ(ChoosePersistentTile(Shape(4096, 4096), 64, Hopper()), (PersistentTile{64, 2, 1, 2}));
  EXPECT_EQ(ChoosePersistentTile(Shape(4096, 28672), 128, Hopper()),
            (PersistentTile{128, 2, 1, 1}));
  EXPECT_EQ(ChoosePersistentTile(Shape(14336, 4096), 256, Hopper()),
            (PersistentTile{128, 2, 1, 1}));
  EXPECT_EQ(ChoosePersistentTile(Shape(4096, 28672), 256, Hopper()),
            (PersistentTile{256, 2, 1, 1}));
  EXPECT_EQ(ChoosePersistentTile(Shape(4096, 28672), 4096, Hopper()),
            (PersistentTile{256, 2, 2, 1}));
}

TEST(PersistentTilesTest, SharesAreEvenWhereThatLeavesFewMultiprocessorsIdle) {
  const PersistentTile tile{128, 2, 1, 1};
  const Schedule whole = PersistentSchedule(Shape(4096, 4096), 512, tile, Hopper());
  EXPECT_EQ(whole.clusters, 128);
  EXPECT_EQ(whole.rounds, 1);
  EXPECT_EQ(whole.split, 0);
  const Schedule quarters = PersistentSchedule(Shape(4096, 4096), 128, tile, Hopper());
  EXPECT_EQ(quarters.clusters, 128);
  EXPECT_EQ(quarters.split, 32);
  // 48 tiles: two parts each would leave 36 of 132 idle; 1792: only the last of 14 rounds is cut.
  EXPECT_EQ(PersistentSchedule(Shape(4096, 6144), 128, tile, Hopper()).clusters, 132);
  EXPECT_EQ(PersistentSchedule(Shape(4096, 28672), 1024, tile, Hopper()).clusters, 132);
}

TEST(PersistentTilesTest, AKernelThatLeavesRoomForTheNextTakesEveryMultiprocessor) {
  const PersistentTile tile{64, 2, 1, 2};
  EXPECT_EQ(PersistentSchedule(Shape(4096, 4096), 64, tile, Hopper()).clusters, 132);
  EXPECT_EQ(PersistentSchedule(Shape(14336, 4096), 512, tile, Hopper()).clusters, 132);
}

TEST(PersistentTilesTest, EveryClusterOfACutTileHasWork) {
  for (const PersistentTile& tile : PersistentTiles()) {
    for (int64_t m : {1, 64, 257, 4096}) {
      for (const auto& [k, n] : {std::pair{32, 8}, {128, 64}, {4096, 4096}, {96, 28672}}) {
        const Schedule s = PersistentSchedule(Shape(k, n), m, tile, Hopper());
        EXPECT_GE(s.tiles() * s.k_blocks, s.clusters);
        EXPECT_LE(s.clusters * tile.cluster, 132);
        EXPECT_LE(s.clusters * tile.cluster * tile.groups, kStreamCounters);
      }
    }
  }
}

TEST(PersistentTilesTest, TheSlotsHoldEveryTile) {
  for (const PersistentTile& tile : PersistentTiles()) {
    EXPECT_LE(132 * PersistentSlotFloats(tile) * 4, PersistentSumsBytes(Hopper()));
  }
}

}  // namespace
}  // namespace awqd::cuda
