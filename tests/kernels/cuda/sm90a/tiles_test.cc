// The persistent product's tiles fit the machine, and the plan describes them.
#include "kernels/cuda/sm90a/tiles.h"

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "kernels/cuda/sm90a/rows.h"
#include "kernels/plan/plan.h"
#include "tests/kernels/cuda/gpus.h"
#include "tests/kernels/cuda/sm90a/shapes.h"

namespace awqd::cuda {
namespace {

// A weight of every kind of records for which kernels are compiled.
std::vector<WeightShape> EveryKind() {
  std::vector<WeightShape> out = {Shape(4096, 4096), Shape(4096, 4096, 64), Shape(4096, 4096, 32)};
  for (const char* text : {"w8cs",
                           "w8g128s",
                           "w8g32s",
                           "e2m1g16+e4m3*t",
                           "e4m3c+fp32",
                           "e4m3b128x128+fp32",
                           "e4m3g32+fp32",
                           "t4g64+fp32",
                           "w1g128z",
                           "w2g128z",
                           "w3g64z",
                           "w5g32s",
                           "w6g128z",
                           "w7g32s",
                           "w1g32o:fp32+fp32",
                           "w2g16o:fp32+fp32",
                           "w3g16s+fp32",
                           "e2m1g32",
                           "w4g32o:fp32+fp32",
                           "w5g32o:fp32+fp32",
                           "w6g16s+fp32",
                           "w8g64r"}) {
    out.push_back({4096, 4096, ParseScheme(text).value()});
  }
  return out;
}

std::vector<PersistentTile> AllTiles(const WeightShape& shape) {
  std::vector<PersistentTile> out = PersistentTiles(shape);
  for (const PersistentTile& tile : FixedOrderTiles(shape)) out.push_back(tile);
  return out;
}

TEST(PersistentTilesTest, TheRingsFitSharedMemoryAndAreDeep) {
  for (const WeightShape& shape : EveryKind()) {
    const RecordKind kind = KindOf(shape);
    for (const PersistentTile& tile : AllTiles(shape)) {
      // A block uses 1 KB itself.
      EXPECT_LE(SharedBytes(tile, kind) + 1024, 228 * 1024);
      const int slots = RingSlots(tile, kind);
      EXPECT_EQ(slots % tile.slices, 0);
      // The largest records leave room for two beside 256 tokens (tile_list.h).
      const bool large = kind.real_zeros || kind == kTable;
      EXPECT_GE(slots / tile.slices, large && tile.tokens == 256 ? 2 : 3) << tile.tokens;
    }
  }
}

TEST(TileCostTest, AreAllListedOnceInOrder) {
  const auto key = [](const PersistentTile& t) {
    return std::tuple(t.tokens, t.records, t.cluster, t.splits, t.accumulators, t.slices);
  };
  const WeightShape shape = Shape(4096, 4096);
  for (const auto& tiles : {PersistentTiles(shape), FixedOrderTiles(shape)}) {
    for (size_t i = 1; i < tiles.size(); ++i) EXPECT_LT(key(tiles[i - 1]), key(tiles[i])) << i;
  }
}

TEST(PersistentTilesTest, ThoseOfE4m3ActivationsFit) {
  const WeightShape shape = {4096, 4096, ParseScheme("e4m3b128x128+fp32").value()};
  const auto tiles = PersistentTiles(shape, DType::kE4m3);
  EXPECT_EQ(tiles.size(), 10u);
  for (const PersistentTile& tile : tiles) {
    EXPECT_LE(SharedBytes(tile, E4m3(1), DType::kE4m3) + 1024, 228 * 1024);
    EXPECT_GE(RingSlots(tile, E4m3(1), DType::kE4m3) / tile.slices, 3) << tile.tokens;
    EXPECT_LE(132 * tile.tokens * 64 * tile.records * 4, PersistentSumsBytes(H100()));
  }
}

TEST(PersistentTilesTest, TheSlotsHoldEveryTile) {
  for (const PersistentTile& tile : PersistentTiles(Shape(4096, 4096))) {
    EXPECT_LE(132 * tile.tokens * 64 * tile.records * 4, PersistentSumsBytes(H100()));
  }
}

TEST(PersistentTilesTest, TheLastTileCopiesItsTokensAndFewMore) {
  for (const PersistentTile& tile : AllTiles(Shape(4096, 4096))) {
    for (int64_t m = 1; m < 1100; ++m) {
      const int rows = LastTokenRows(m, tile);
      ASSERT_LE(rows, TokenRows(tile));
      // Swizzled eight rows at a time; the copy engine copies 256 at most.
      ASSERT_EQ(rows % 8, 0) << m;
      ASSERT_LE(rows, 256);
      const int64_t last = (m - 1) % tile.tokens + 1;
      ASSERT_GE(rows * tile.cluster, last) << m;
      ASSERT_LT(rows * tile.cluster, last + 8 * tile.cluster) << m;
      if (tile.cluster == 1) continue;
      // Two blocks copy all tokens, and fewer than eight rows after them if there are that many.
      const int second = LastTokenStride(m, tile);
      ASSERT_LE(second, rows) << m;
      ASSERT_EQ(second % 8, 0) << m;
      ASSERT_GE(second + rows, last) << m;
      ASSERT_LT(second + rows, last + 8) << m;
    }
  }
}

TEST(PersistentTilesTest, TheLargestLayersArePreferredFromNineTokensOnWhereMemoryIsFast) {
  DeviceInfo h200 = H100();
  h200.memory_bytes_per_s = 4'917'000'000'000;
  const auto from = [&](int64_t k, int64_t n, const char* scheme) {
    return PersistentA16Row().preferred_from({k, n, ParseScheme(scheme).value()}, h200);
  };
  EXPECT_EQ(from(8192, 57344, "w4g128z"), 9);
  EXPECT_EQ(from(8192, 57344, "w4cz"), 9);
  EXPECT_EQ(from(8192, 57344, "w4g64z"), 17);  // no such tile
  EXPECT_EQ(from(8192, 57344, "w8g128z"), 17);
  EXPECT_EQ(from(8192, 57344, "e2m1g32+e8m0"), 17);
  EXPECT_EQ(from(4096, 4096, "w4g128z"), 17);
  h200.memory_bytes_per_s = 3'352'000'000'000;  // an H100's
  EXPECT_EQ(from(8192, 57344, "w4g128z"), 17);
}

TEST(PersistentTilesTest, ThePlanSaysThem) {
  const PlanEntry entry{Path::kFused, 17, -1, &PersistentA16Row()};
  EXPECT_EQ(
      DescribeTiles(entry, Shape(4096, 28672), H100()),
      "17-32: 32x256 on 66 pairs of blocks, 64: 64x192 on 132 blocks, 128: 128x128 on 132 blocks, "
      "256-4096: 256x256 on 66 pairs of blocks");
}

TEST(PersistentTilesTest, ThePlanSaysPartsAndSlices) {
  const PlanEntry entry{Path::kFused, 25, 128, &PersistentA16Row()};
  EXPECT_EQ(
      DescribeTiles(entry, Shape(14336, 4096), H100()),
      "25-32: 32x64 in 2 splits of 2 slices on 128 blocks, 64: 64x64 in 2 splits of 2 slices on "
      "128 blocks, 128: 128x64 in 2 splits on 128 blocks");
}

}  // namespace
}  // namespace awqd::cuda
