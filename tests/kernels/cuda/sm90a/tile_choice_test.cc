// The tile that is chosen for a weight and a number of tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/common/fixed_order.h"
#include "kernels/cuda/sm90a/tiles.h"
#include "tests/kernels/cuda/gpus.h"
#include "tests/kernels/cuda/sm90a/shapes.h"

namespace awqd::cuda {
namespace {

TEST(PersistentTilesTest, TheChosenTileIsCompiled) {
  for (const int64_t group : {128, 64, 32}) {
    for (int64_t m : {1, 17, 33, 64, 65, 128, 129, 256, 300, 1024, 4096, 100000}) {
      for (const auto& [k, n] : {std::pair{4096, 4096}, {14336, 4096}, {4096, 28672}, {128, 8}}) {
        const WeightShape shape = Shape(k, n, group);
        const std::vector<PersistentTile> tiles = PersistentTiles(shape);
        const std::vector<PersistentTile> fixed_order = FixedOrderTiles(shape);
        const PersistentTile tile = ChoosePersistentTile(shape, m, H100());
        EXPECT_EQ(std::count(tiles.begin(), tiles.end(), tile), 1) << m << " " << k;
        const PersistentTile other = ChooseFixedOrderTile(shape, m, H100());
        EXPECT_EQ(std::count(fixed_order.begin(), fixed_order.end(), other), 1) << m << " " << k;
      }
    }
  }
}

// awqd_bench --tiles measures the tiles among which the choice is made.
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
        EXPECT_EQ(best(RateFixedOrderTiles(shape, m, H100(), x)),
                  ChooseFixedOrderTile(shape, m, H100(), x));
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
  EXPECT_EQ(choice(8192, 10240, 32), (PersistentTile{32, 2, 2}));
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
  EXPECT_EQ(choice(8192, 8192, 256), (PersistentTile{256, 1, 1}));
  EXPECT_EQ(choice(4096, 28672, 4096), (PersistentTile{256, 2, 2}));
}

// Few tiles of short K: a cut costs more than it saves.
TEST(PersistentTilesTest, TilesOfSmallExpertsStayWhole) {
  for (const auto& [k, n, m] : {std::tuple{2048, 1536, 512},
                                {2048, 1536, 1024},
                                {1536, 2048, 512},
                                {1536, 2048, 1024},
                                {4096, 6144, 128}}) {
    const WeightShape shape = Shape(k, n);
    const PersistentTile tile = ChoosePersistentTile(shape, m, H100());
    EXPECT_TRUE(StaysWhole(tile)) << k << " x " << n << ", M " << m << ": " << tile.tokens;
    const StreamKSchedule s = PersistentSchedule(shape, m, tile, H100());
    EXPECT_EQ(s.stream_k_tiles, 0);
    EXPECT_LE(s.clusters, 132);
  }
}

// 120 tiles of 32 steps are cut into 132 runs of 29: two microseconds less, and a cut costs more.
TEST(PersistentTilesTest, TilesAreCutOnlyWhereThatSavesMoreThanACutCosts) {
  const PersistentTile tile{128, 2, 1};
  EXPECT_EQ(PersistentSchedule(Shape(4096, 15360), 128, tile, H100()).stream_k_tiles, 0);
  EXPECT_GT(PersistentSchedule(Shape(14336, 15360), 128, tile, H100()).stream_k_tiles, 0);
}

TEST(PersistentTilesTest, EightKRangesAreDividedAmongTwoSplitsAndTheirSlices) {
  const auto fixed_order = [](int64_t m) {
    return ChooseFixedOrderTile(Shape(14336, 4096), m, H100());
  };
  EXPECT_EQ(fixed_order(32), (PersistentTile{32, 1, 1, 2, 2, 2}));
  EXPECT_EQ(fixed_order(64), (PersistentTile{64, 1, 1, 2, 2, 2}));
  EXPECT_EQ(fixed_order(96), (PersistentTile{96, 1, 1, 2, 2, 2}));
  EXPECT_EQ(fixed_order(128), (PersistentTile{128, 1, 1, 2, 2, 2}));
  EXPECT_EQ(fixed_order(160), (PersistentTile{160, 1, 1, 2, 0}));
  EXPECT_EQ(fixed_order(256), (PersistentTile{128, 2, 1, 2, 0}));
}

// Blocks of three records have no registers for a total.
TEST(PersistentTilesTest, SplitsOfThreeRecordsStoreOneKRangeAtMost) {
  const WeightShape four = Shape(8192, 10240);
  EXPECT_EQ(ChooseFixedOrder(four, H100()).count(), 4);
  EXPECT_EQ(ChooseFixedOrderTile(four, 128, H100()), (PersistentTile{128, 3, 1, 2, 0}));
  const WeightShape eight = Shape(14336, 4096);
  EXPECT_EQ(ChooseFixedOrder(eight, H100()).count(), 8);
  for (int64_t m = 17; m < 1100; ++m) {
    const PersistentTile tile = ChooseFixedOrderTile(eight, m, H100());
    EXPECT_FALSE(tile.accumulators == 0 && tile.records == 3) << m;
  }
}

TEST(PersistentTilesTest, AFewTokensBeyondATileAreNotAWholeTileMore) {
  const auto choice = [](int64_t k, int64_t n, int64_t m) {
    return ChoosePersistentTile(Shape(k, n), m, H100());
  };
  EXPECT_EQ(choice(4096, 4096, 129), (PersistentTile{160, 1, 1, 2}));
  EXPECT_EQ(choice(4096, 28672, 160), (PersistentTile{160, 2, 2}));
  EXPECT_EQ(choice(8192, 57344, 161), (PersistentTile{176, 2, 2}));
  EXPECT_EQ(choice(8192, 8192, 193), (PersistentTile{208, 1, 1}));
  EXPECT_EQ(choice(4096, 28672, 257), (PersistentTile{136, 3, 1}));
  EXPECT_EQ(choice(4096, 28672, 320), (PersistentTile{160, 2, 2}));
  EXPECT_EQ(choice(4096, 6144, 385), (PersistentTile{112, 3, 1}));
  EXPECT_EQ(choice(4096, 6144, 641), (PersistentTile{176, 3, 1}));
  EXPECT_EQ(choice(4096, 28672, 384), (PersistentTile{192, 2, 2}));
  EXPECT_EQ(choice(28672, 8192, 576), (PersistentTile{192, 2, 2}));
  const auto fixed_order = [](int64_t k, int64_t n, int64_t m) {
    return ChooseFixedOrderTile(Shape(k, n), m, H100());
  };
  EXPECT_EQ(fixed_order(8192, 10240, 96), (PersistentTile{96, 3, 1}));
  EXPECT_EQ(fixed_order(8192, 8192, 129), (PersistentTile{136, 2, 1, 2, 2}));
  EXPECT_EQ(fixed_order(8192, 8192, 160), (PersistentTile{160, 2, 1, 2, 2}));
  EXPECT_EQ(fixed_order(8192, 57344, 65), (PersistentTile{80, 3, 1}));
  EXPECT_EQ(fixed_order(4096, 28672, 704), (PersistentTile{176, 2, 2}));
  EXPECT_EQ(fixed_order(28672, 8192, 384), (PersistentTile{192, 2, 2}));
}

TEST(PersistentTilesTest, BFloat16TakesWiderTilesWhereDecodingIsTheLimit) {
  const WeightShape shape = Shape(4096, 6144);
  EXPECT_EQ(ChoosePersistentTile(shape, 384, H100(), DType::kFp16), (PersistentTile{96, 3, 1}));
  EXPECT_EQ(ChoosePersistentTile(shape, 384, H100(), DType::kBf16), (PersistentTile{128, 2, 1}));
}

// Few rows of many experts need narrow tiles; many rows need wide ones.
TEST(GroupedTiles, SuitTheRowsOfAnExpert) {
  const auto choose = [](int64_t experts, int64_t rows) {
    return ChooseGroupedTile90(Shape(4096, 14336), H100(), DType::kFp16, [&](int64_t tokens) {
      return experts * ((rows + tokens - 1) / tokens);
    });
  };
  EXPECT_EQ(choose(8, 20).tokens, 32);
  EXPECT_EQ(choose(8, 60).tokens, 64);
  EXPECT_GE(choose(8, 1024).tokens, 128);
  for (const PersistentTile& tile : {choose(8, 20), choose(8, 100), choose(256, 300)}) {
    EXPECT_EQ(tile.splits, 1);
    const StreamKSchedule s = GroupedSchedule(Shape(4096, 14336), 100, tile, H100());
    EXPECT_LE(s.clusters * tile.cluster, H100().sm_count);
  }
}

}  // namespace
}  // namespace awqd::cuda
