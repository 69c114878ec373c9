// The persistent product's tiles fit the machine, whatever the problem.
#include "kernels/cuda/sm90a/tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "kernels/cuda/common/chains.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/cuda/sm90a/tile_costs.h"
#include "kernels/registry.h"
#include "tests/kernels/cuda/gpus.h"

namespace awqd::cuda {
namespace {

WeightShape Shape(int64_t k, int64_t n, int64_t group = 128) {
  WeightShape shape{k, n, {}};
  shape.scheme.group_size = group;
  return shape;
}

// A weight of every kind of records that kernels are compiled for.
std::vector<WeightShape> EveryKind() {
  return {Shape(4096, 4096), Shape(4096, 4096, 64), Shape(4096, 4096, 32)};
}

std::vector<PersistentTile> AllTiles(const WeightShape& shape) {
  std::vector<PersistentTile> out = PersistentTiles(shape);
  for (const PersistentTile& tile : ChainedTiles(shape)) out.push_back(tile);
  return out;
}

TEST(PersistentTilesTest, TheRingsFitSharedMemoryAndAreAtLeastThreeDeep) {
  for (const WeightShape& shape : EveryKind()) {
    const RecordKind kind = KindOf(mma16::MetasPerRecord(shape.k, shape.scheme.group_size));
    for (const PersistentTile& tile : AllTiles(shape)) {
      // A block takes 1 KB for itself.
      EXPECT_LE(SharedBytes(tile, kind) + 1024, 228 * 1024);
      const int slots = RingSlots(tile, kind);
      EXPECT_EQ(slots % tile.slices, 0);
      EXPECT_GE(slots / tile.slices, 3);
    }
  }
}

TEST(PersistentTilesTest, TheChosenTileIsCompiled) {
  for (const int64_t group : {128, 64, 32}) {
    for (int64_t m : {1, 17, 33, 64, 65, 128, 129, 256, 300, 1024, 4096, 100000}) {
      for (const auto& [k, n] : {std::pair{4096, 4096}, {14336, 4096}, {4096, 28672}, {128, 8}}) {
        const WeightShape shape = Shape(k, n, group);
        const std::vector<PersistentTile> tiles = PersistentTiles(shape);
        const std::vector<PersistentTile> chained = ChainedTiles(shape);
        const PersistentTile tile = ChoosePersistentTile(shape, m, H100());
        EXPECT_EQ(std::count(tiles.begin(), tiles.end(), tile), 1) << m << " " << k;
        const PersistentTile other = ChooseChainedTile(shape, m, H100());
        EXPECT_EQ(std::count(chained.begin(), chained.end(), other), 1) << m << " " << k;
      }
    }
  }
}

// What awqd_bench --tiles measures is what the choice is made among.
TEST(PersistentTilesTest, TheChosenTileIsTheBestRated) {
  const auto best = [](const std::vector<RatedTile>& rated) {
    EXPECT_GT(rated.size(), 1u);
    for (const RatedTile& tile : rated) {
      EXPECT_GT(tile.steps_us, 0);
      EXPECT_LT(tile.steps_us, tile.microseconds);
    }
    return std::min_element(rated.begin(), rated.end(),
                            [](const RatedTile& a, const RatedTile& b) {
                              return a.microseconds < b.microseconds;
                            })
        ->tile;
  };
  for (int64_t m : {17, 64, 96, 300, 1024}) {
    for (DType x : {DType::kFp16, DType::kBf16}) {
      for (const auto& [k, n] : {std::pair{4096, 4096}, {14336, 4096}, {8192, 10240}}) {
        const WeightShape shape = Shape(k, n);
        EXPECT_EQ(best(RatePersistentTiles(shape, m, H100(), x)),
                  ChoosePersistentTile(shape, m, H100(), x));
        EXPECT_EQ(best(RateChainedTiles(shape, m, H100(), x)),
                  ChooseChainedTile(shape, m, H100(), x));
      }
    }
  }
}

TEST(PersistentTilesTest, FewTokensGetNarrowTilesAndManyWideOnes) {
  const auto choice = [](int64_t k, int64_t n, int64_t m) {
    return ChoosePersistentTile(Shape(k, n), m, H100());
  };
  EXPECT_EQ(choice(4096, 4096, 24), (PersistentTile{32, 1, 1, 2, 1, 2}));
  EXPECT_EQ(choice(4096, 6144, 32), (PersistentTile{32, 2, 1, 2, 1, 2}));
  EXPECT_EQ(choice(4096, 4096, 32), (PersistentTile{32, 1, 1, 2, 1, 2}));
  EXPECT_EQ(choice(14336, 4096, 32), (PersistentTile{32, 1, 1, 2, 1, 2}));
  EXPECT_EQ(choice(28672, 8192, 32), (PersistentTile{32, 2, 1, 2, 1, 2}));
  EXPECT_EQ(choice(8192, 10240, 32), (PersistentTile{40, 3, 1, 2}));
  EXPECT_EQ(choice(4096, 28672, 32), (PersistentTile{32, 2, 2}));
  EXPECT_EQ(choice(4096, 28672, 64), (PersistentTile{64, 3, 1}));
  EXPECT_EQ(choice(4096, 4096, 64), (PersistentTile{64, 1, 1, 2, 1, 2}));
  EXPECT_EQ(choice(14336, 4096, 64), (PersistentTile{64, 1, 1, 2, 1, 2}));
  EXPECT_EQ(choice(8192, 8192, 64), (PersistentTile{64, 2, 1, 2}));
  EXPECT_EQ(choice(8192, 10240, 64), (PersistentTile{64, 2, 2}));
  EXPECT_EQ(choice(4096, 28672, 65), (PersistentTile{80, 3, 1}));
  EXPECT_EQ(choice(4096, 28672, 96), (PersistentTile{96, 3, 1}));
  EXPECT_EQ(choice(4096, 4096, 128), (PersistentTile{128, 1, 1, 2}));
  EXPECT_EQ(choice(8192, 8192, 128), (PersistentTile{128, 2, 1, 2}));
  EXPECT_EQ(choice(4096, 6144, 512), (PersistentTile{128, 3, 1}));
  EXPECT_EQ(choice(14336, 4096, 256), (PersistentTile{256, 1, 1, 2}));
  EXPECT_EQ(choice(8192, 8192, 256), (PersistentTile{128, 2, 1}));
  EXPECT_EQ(choice(4096, 28672, 4096), (PersistentTile{256, 2, 2}));
}

// More blocks would come in two waves.
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

// Or a weight that is served in order would change rows where one that is not does not.
TEST(PersistentTilesTest, BothRowsServeTheSameCounts) {
  EXPECT_EQ(PersistentA16W4Row().min_m, ChainedA16W4Row().min_m);
}

TEST(PersistentTilesTest, EightChainsAreDealtOutToTwoPartsAndTheirSlices) {
  const auto chained = [](int64_t m) { return ChooseChainedTile(Shape(14336, 4096), m, H100()); };
  EXPECT_EQ(chained(32), (PersistentTile{32, 1, 1, 2, 2, 2}));
  EXPECT_EQ(chained(64), (PersistentTile{64, 1, 1, 2, 2, 2}));
  EXPECT_EQ(chained(96), (PersistentTile{96, 1, 1, 2, 2, 2}));
  EXPECT_EQ(chained(128), (PersistentTile{128, 1, 1, 2, 2, 2}));
  EXPECT_EQ(chained(160), (PersistentTile{160, 1, 1, 2, 0}));
  EXPECT_EQ(chained(256), (PersistentTile{128, 2, 1, 2, 0}));
}

// Three groups have no registers for a total.
TEST(PersistentTilesTest, PartsOfThreeGroupsPutDownOneChainAtMost) {
  const WeightShape four = Shape(8192, 10240);
  EXPECT_EQ(MatmulChains(four, H100()).count(), 4);
  EXPECT_EQ(ChooseChainedTile(four, 128, H100()), (PersistentTile{128, 3, 1, 2, 0}));
  const WeightShape eight = Shape(14336, 4096);
  EXPECT_EQ(MatmulChains(eight, H100()).count(), 8);
  for (int64_t m = 17; m < 1100; ++m) {
    const PersistentTile tile = ChooseChainedTile(eight, m, H100());
    EXPECT_FALSE(tile.sets == 0 && tile.records == 3) << m;
  }
}

TEST(PersistentTilesTest, AFewTokensBeyondATileAreNotAWholeTileMore) {
  const auto choice = [](int64_t k, int64_t n, int64_t m) {
    return ChoosePersistentTile(Shape(k, n), m, H100());
  };
  EXPECT_EQ(choice(4096, 4096, 129), (PersistentTile{160, 1, 1, 2}));
  EXPECT_EQ(choice(4096, 28672, 160), (PersistentTile{160, 2, 2}));
  EXPECT_EQ(choice(8192, 57344, 161), (PersistentTile{176, 2, 2}));
  EXPECT_EQ(choice(8192, 8192, 193), (PersistentTile{208, 2, 1, 2}));
  EXPECT_EQ(choice(4096, 28672, 257), (PersistentTile{136, 3, 1}));
  EXPECT_EQ(choice(4096, 28672, 320), (PersistentTile{160, 2, 2}));
  EXPECT_EQ(choice(4096, 6144, 385), (PersistentTile{112, 3, 1}));
  EXPECT_EQ(choice(4096, 6144, 641), (PersistentTile{176, 3, 1}));
  EXPECT_EQ(choice(4096, 28672, 384), (PersistentTile{192, 2, 2}));
  EXPECT_EQ(choice(28672, 8192, 576), (PersistentTile{192, 2, 2}));
  const auto chained = [](int64_t k, int64_t n, int64_t m) {
    return ChooseChainedTile(Shape(k, n), m, H100());
  };
  EXPECT_EQ(chained(8192, 10240, 96), (PersistentTile{96, 3, 1}));
  EXPECT_EQ(chained(8192, 8192, 129), (PersistentTile{136, 2, 1, 2, 2}));
  EXPECT_EQ(chained(8192, 8192, 160), (PersistentTile{160, 2, 1, 2, 2}));
  EXPECT_EQ(chained(8192, 57344, 65), (PersistentTile{80, 3, 1}));
  EXPECT_EQ(chained(4096, 28672, 704), (PersistentTile{176, 2, 2}));
  EXPECT_EQ(chained(28672, 8192, 384), (PersistentTile{192, 2, 2}));
}

TEST(PersistentTilesTest, BFloat16TakesWiderTilesWhereDecodingIsTheLimit) {
  const WeightShape shape = Shape(4096, 6144);
  EXPECT_EQ(ChoosePersistentTile(shape, 384, H100(), DType::kFp16), (PersistentTile{96, 3, 1}));
  EXPECT_EQ(ChoosePersistentTile(shape, 384, H100(), DType::kBf16), (PersistentTile{128, 2, 1}));
}

int ClustersOfTile(const Schedule& s) {
  std::vector<int> clusters(s.tiles());
  for (int cluster = 0; cluster < s.clusters; ++cluster) {
    Pieces pieces(s, cluster);
    for (Piece piece; pieces.Next(&piece);) ++clusters[piece.tile];
  }
  return *std::max_element(clusters.begin(), clusters.end());
}

// With so many steps that a run's end, a whole step, is as good as its fraction.
TEST(TileCostTest, KnowsHowManyClustersMeetInATile) {
  for (int tiles : {1, 2, 3, 22, 32, 48, 54, 64, 66, 88, 131, 132, 133, 144, 160, 224, 264, 1792}) {
    for (int clusters : {66, 132}) {
      const Schedule s = MakeSchedule(tiles, 1000, clusters);
      if (s.split == 0) continue;
      EXPECT_EQ(MostClustersOfTile(s), ClustersOfTile(s)) << tiles << " on " << clusters;
    }
  }
}

TEST(TileCostTest, AreAllListedOnceInOrder) {
  const auto key = [](const PersistentTile& t) {
    return std::tuple(t.tokens, t.records, t.cluster, t.parts, t.sets, t.slices);
  };
  const WeightShape shape = Shape(4096, 4096);
  for (const auto& tiles : {PersistentTiles(shape), ChainedTiles(shape)}) {
    for (size_t i = 1; i < tiles.size(); ++i) EXPECT_LT(key(tiles[i - 1]), key(tiles[i])) << i;
  }
}

// A step with more tokens takes longer, and no longer than in proportion; within what is measured.
TEST(TileCostTest, StepsGrowWithTilesAndNoFaster) {
  for (const TileCost& a : kFreeTiles4) {
    for (const TileCost& b : kFreeTiles4) {
      const PersistentTile wider{b.tile.tokens, a.tile.records, a.tile.cluster,
                                 a.tile.parts,  a.tile.sets,    a.tile.slices};
      if (!(b.tile == wider) || b.tile.tokens <= a.tile.tokens) continue;
      EXPECT_GT(b.fp16_us, 0.98 * a.fp16_us) << a.tile.tokens << " " << b.tile.tokens;
      EXPECT_LT(b.fp16_us / b.tile.tokens, 1.05 * a.fp16_us / a.tile.tokens)
          << a.tile.tokens << " " << b.tile.tokens << " x " << a.tile.records;
    }
  }
}

TEST(TileCostTest, WhatIsCutCostsMoreThanWhatIsWhole) {
  const TileCost tile{{128, 2, 1}, 0.7, 0.8};
  const double whole = Microseconds(MakeSchedule(132, 32, 132), tile, DType::kFp16, 132);
  EXPECT_LT(whole, Microseconds(MakeSchedule(131, 32, 132), tile, DType::kFp16, 132));
  EXPECT_NEAR(whole, 32 * 0.7 + kStartUs + StoreUs(2), 1e-9);
  // Half as many tiles have half the steps and a cut each.
  EXPECT_NEAR(Microseconds(MakeSchedule(66, 32, 132), tile, DType::kBf16, 132),
              16 * 0.8 + kStartUs + StoreUs(2) / 2 + PutDownUs(2) + TakeOverUs(2), 1e-9);
}

TEST(PersistentTilesTest, ThePlanSaysThem) {
  const PlanEntry entry{Path::kFused, 17, -1, &PersistentA16W4Row()};
  EXPECT_EQ(
      DescribeTiles(entry, Shape(4096, 28672), H100()),
      "17-32: 32x256 on 66 pairs of blocks, 64: 64x192 on 132 blocks, 128: 128x128 on 132 blocks, "
      "256-4096: 256x256 on 66 pairs of blocks");
}

TEST(PersistentTilesTest, ThePlanSaysPartsAndSlices) {
  const PlanEntry entry{Path::kFused, 25, 128, &PersistentA16W4Row()};
  EXPECT_EQ(
      DescribeTiles(entry, Shape(14336, 4096), H100()),
      "25-32: 32x64 in 2 parts of 2 slices on 128 blocks, 64: 64x64 in 2 parts of 2 slices on "
      "128 blocks, 128: 128x64 in 2 parts on 128 blocks");
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
  // 48 tiles: two parts each would leave 36 of 132 idle; 1792: only the last of 14 rounds is cut.
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

TEST(PersistentTilesTest, TheLastTileCopiesItsTokensAndFewMore) {
  for (const PersistentTile& tile : AllTiles(Shape(4096, 4096))) {
    for (int64_t m = 1; m < 1100; ++m) {
      const int rows = LastTokenRows(m, tile);
      ASSERT_LE(rows, TokenRows(tile));
      // Swizzled in groups of eight rows; the copy engine takes 256 at most.
      ASSERT_EQ(rows % 8, 0) << m;
      ASSERT_LE(rows, 256);
      const int64_t last = (m - 1) % tile.tokens + 1;
      ASSERT_GE(rows * tile.cluster, last) << m;
      ASSERT_LT(rows * tile.cluster, last + 8 * tile.cluster) << m;
    }
  }
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
          // All chains, and where they stay in registers each with a step.
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

TEST(PersistentTilesTest, TheSlotsHoldEveryTile) {
  for (const PersistentTile& tile : PersistentTiles(Shape(4096, 4096))) {
    EXPECT_LE(132 * tile.tokens * 64 * tile.records * 4, PersistentSumsBytes(H100()));
  }
}

}  // namespace
}  // namespace awqd::cuda
