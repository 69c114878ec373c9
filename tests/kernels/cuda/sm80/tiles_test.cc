// The tile choice of the fused product on invented devices.
#include "kernels/cuda/sm80/tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/common/fixed_order.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/layouts/mma16.h"
#include "tests/kernels/cuda/gpus.h"

namespace awqd::cuda {
namespace {

WeightShape Weight(int64_t k, int64_t n, int64_t group = 128) {
  WeightShape out{k, n, {}};
  out.scheme = Asymmetric(4, group);
  return out;
}

// One weight of every kind of records.
std::vector<WeightShape> EveryKind() {
  std::vector<WeightShape> out;
  for (int bits : {1, 2, 3, 4, 8}) {
    for (int64_t group : {16, 32, 64, 128}) out.push_back({4096, 4096, Asymmetric(bits, group)});
  }
  out.push_back({4096, 4096, Symmetric(8, 0)});
  return out;
}

TEST(ChooseMatmulTile, CoversTheTokensWithTheSmallestTile) {
  const int64_t counts[][2] = {{1, 8},    {8, 8},     {9, 16},    {16, 16},   {17, 24},
                               {25, 32},  {33, 48},   {49, 64},   {64, 64},   {65, 96},
                               {97, 128}, {128, 128}, {129, 128}, {4097, 128}};
  for (const auto& [m, tokens] : counts) {
    EXPECT_EQ(ChooseMatmulTile(Weight(4096, 4096), m, H100()).tokens, tokens) << m << " tokens";
  }
  EXPECT_EQ(ChooseMatmulTile(Weight(8192, 8192), 128, H100()).tokens, 64)
      << "the widest of four k-ranges";
}

TEST(ChooseMatmulTile, KeepsTheKRangesForEveryNumberOfTokens) {
  for (const auto& [k, n] : {std::pair{4096, 4096}, {14336, 4096}, {4096, 28672}, {96, 8}}) {
    const WeightShape weight = Weight(k, n, k == 96 ? 96 : 128);
    const FixedOrder k_ranges = ChooseFixedOrder(weight, H100());
    for (int64_t m = 1; m < 300; ++m) {
      ASSERT_EQ(ChooseMatmulTile(weight, m, H100()).k_ranges, k_ranges);
    }
  }
}

TEST(StreamKBlocks, AreOneForEachMultiprocessorWhereWholeTilesAreUneven) {
  EXPECT_EQ(StreamKBlocks(Weight(3584, 18944), 1, H100()), 132);
  EXPECT_EQ(StreamKBlocks(Weight(8192, 57344, 64), 16, H100()), 132);
  EXPECT_EQ(StreamKBlocks(Weight(8192, 132 * 64), 1, H100()), 0) << "as many tiles";
  EXPECT_EQ(StreamKBlocks(Weight(8192, 132 * 64 + 1), 1, H100()), 132);
  EXPECT_EQ(StreamKBlocks(Weight(8192, 330 * 64), 1, H100()), 132);
  EXPECT_EQ(StreamKBlocks(Weight(8192, 331 * 64), 1, H100()), 0) << "three or four at a time";
  EXPECT_EQ(StreamKBlocks(Weight(4096, 528 * 64), 1, H100()), 0);
  EXPECT_EQ(StreamKBlocks(Weight(4096, 529 * 64), 1, H100()), 132) << "waves";
  EXPECT_EQ(StreamKBlocks(Weight(2048, 57344), 1, H100()), 0) << "short tiles";
  EXPECT_EQ(StreamKBlocks(Weight(4096, 10240), 1, H100()), 0) << "few records";
  EXPECT_EQ(StreamKBlocks(Weight(3584, 18944), 1, Gpu(80, 108, 166912)), 0) << "before sm_90";
  // An RTX 50 has too little room, as for 16 tokens where 8 have room.
  EXPECT_EQ(StreamKBlocks(Weight(8192, 10240), 1, Gpu(120, 84, 101376)), 0);
  EXPECT_EQ(StreamKBlocks(Weight(3584, 18944), 8, Gpu(90, 132, 131072)), 132);
  EXPECT_EQ(StreamKBlocks(Weight(3584, 18944), 9, Gpu(90, 132, 131072)), 0);
}

TEST(ChooseMatmulTile, DividesLongKRangesAmongTwoBlocksWhereActivationsAreMany) {
  const WeightShape longest = Weight(28672, 8192);
  const MatmulTile few = ChooseMatmulTile(longest, 8, H100());
  const MatmulTile many = ChooseMatmulTile(longest, 16, H100());
  EXPECT_EQ(few.k_ranges, ChooseFixedOrder(longest, H100()));
  EXPECT_EQ(few.row_tiles, 1);
  EXPECT_EQ(many.k_ranges, (FixedOrder{2, 2, few.k_ranges.length})) << "the same k-ranges";
  EXPECT_EQ(many.k_ranges.count(), few.k_ranges.count());
  EXPECT_EQ(many.row_tiles, 2);
  EXPECT_EQ(ChooseMatmulTile(Weight(8192, 8192), 16, H100()).k_ranges.splits, 1);
  EXPECT_EQ(ChooseMatmulTile(longest, 16, H100(), DType::kBf16).row_tiles, 1);
}

TEST(ChooseMatmulTile, TakesTwoRowTilesOnlyWhereBlocksAreLeft) {
  EXPECT_EQ(ChooseMatmulTile(Weight(4096, 28672), 1, H100()).row_tiles, 2);
  EXPECT_EQ(ChooseMatmulTile(Weight(4096, 4096), 1, H100()).row_tiles, 1);
  EXPECT_EQ(ChooseMatmulTile(Weight(8192, 8192), 8, H100()).row_tiles, 1);
  EXPECT_EQ(ChooseMatmulTile(Weight(8192, 10240), 64, H100()).row_tiles, 2);
  EXPECT_EQ(ChooseMatmulTile(Weight(8192, 57344), 1, H100()).row_tiles, 1)
      << "more than can be resident at once";
}

TEST(ChooseMatmulTile, HasWideTilesForGpusWithLessSharedMemory) {
  const DeviceInfo a100 = Gpu(80, 108, 166912);
  EXPECT_EQ(ChooseMatmulTile(Weight(4096, 28672), 128, a100).tokens, 128);
  EXPECT_EQ(ChooseMatmulTile(Weight(4096, 28672), 128, a100).row_tiles, 2);
  EXPECT_EQ(ChooseMatmulTile(Weight(4096, 4096), 96, a100).tokens, 96);
}

void ExpectFits(const WeightShape& weight, int64_t m, const DeviceInfo& device) {
  for (DType x : {DType::kFp16, DType::kInt8, DType::kE4m3}) {
    if (x == DType::kInt8 && !weight.scheme.is_integer()) continue;
    if (x == DType::kE4m3 && (!RefusesFloat8(weight).empty() || device.arch < 89)) continue;
    const RingBytes bytes = RingBytesOf(weight, x);
    const MatmulTile tile = ChooseMatmulTile(weight, m, device, x);
    bool compiled = false;
    for (const MatmulVariant& variant : MatmulVariants(weight, x)) {
      if (variant.tokens != tile.tokens || variant.row_tiles != tile.row_tiles ||
          variant.k_ranges != tile.k_ranges.per_block) {
        continue;
      }
      compiled = true;
      EXPECT_LE(MatmulSharedBytes(variant, bytes, tile.k_ranges.splits, device),
                device.shared_bytes_per_block);
    }
    EXPECT_TRUE(compiled) << Name(x) << ": " << tile.tokens << " x " << tile.row_tiles;
  }
}

TEST(ChooseMatmulTile, StaysWithinSharedMemory) {
  // GPUs with 227, 163, 99 and 64 KB, and the group size that needs most.
  for (const int64_t bytes : {232448, 166912, 101376, 65536}) {
    for (const int64_t group : {16, 128}) {
      for (int64_t m = 1; m < 300; ++m) {
        ExpectFits(Weight(4096, 28672, group), m, Gpu(80, 84, bytes));
        if (bytes < 101376) continue;  // no GPU of compute capability 8.0 and later has less
        for (int bits : {1, 2, 3, 8}) {
          ExpectFits({4096, 28672, Asymmetric(bits, group)}, m, Gpu(80, 84, bytes));
        }
        for (const char* text : {"e2m1g16+e4m3*t", "t4g16+fp32", "e4m3g16", "e4m3b128x128+fp32",
                                 "w4g32r", "w8g32o+fp32"}) {
          ExpectFits({4096, 28672, ParseScheme(text).value()}, m, Gpu(80, 84, bytes));
        }
        // Tiles of two blocks, and of eight.
        ExpectFits(Weight(14336, 4096, group), m, Gpu(90, 132, bytes));
        ExpectFits(Weight(4096, 512, group), m, Gpu(90, 132, bytes));
        // Tiles of two blocks with room for four k-ranges.
        ExpectFits(Weight(28672, 8192, group), m, Gpu(90, 132, bytes));
      }
    }
  }
}

// Blocks of an L40S and an RTX 50 have 99 KB, those of a B200 227.
TEST(ChooseMatmulTile, HasTilesOfE4m3ForEveryGpuWithSuchInstructions) {
  for (const DeviceInfo& gpu :
       {Gpu(89, 142, 101376), Gpu(120, 84, 101376), Gpu(100, 148, 232448)}) {
    for (const char* scheme : {"e4m3c+fp32", "e4m3b128x128+fp32", "e2m1g32+e8m0"}) {
      for (const auto& [k, n] : {std::pair{4096, 28672}, {4096, 512}, {28672, 8192}}) {
        const WeightShape weight = {k, n, ParseScheme(scheme).value()};
        for (int64_t m = 1; m < 300; ++m) ExpectFits(weight, m, gpu);
      }
    }
    const WeightShape blocks = {4096, 28672, ParseScheme("e4m3b128x128+fp32").value()};
    EXPECT_EQ(ChooseMatmulTile(blocks, 128, gpu, DType::kE4m3).tokens, 128) << gpu.arch;
  }
}

TEST(ChooseMatmulTile, HasFourKRangesOnlyWhereEveryTileOfThemFits) {
  const int64_t needed = [] {
    int64_t most = 0;
    for (const WeightShape& weight : EveryKind()) {
      for (const MatmulVariant& variant : MatmulVariants(weight, DType::kFp16)) {
        if (variant.k_ranges != 4) continue;
        most = std::max(most, MatmulSharedBytes(variant, {mma16::RecordBytes(weight)}, 1, H100()));
      }
    }
    return most;
  }();
  EXPECT_EQ(ChooseMatmulTile(Weight(8192, 8192), 1, Gpu(90, 132, needed)).k_ranges.per_block, 4);
  EXPECT_EQ(ChooseMatmulTile(Weight(8192, 8192), 1, Gpu(90, 132, needed - 1)).k_ranges.per_block,
            2);
}

TEST(ChooseMatmulTile, FitsTuringWithTwoSlotsInEveryRing) {
  const DeviceInfo t4 = Gpu(75, 40, kTuringSharedBytes);
  for (const WeightShape& weight : EveryKind()) {
    for (int64_t m = 1; m < 300; ++m) ExpectFits(weight, m, t4);
  }
  for (const char* text : {"w1g16z", "w2g16z", "w3g16z", "w4g16z", "w8g16z", "t4g16+fp32",
                           "e4m3g16", "e2m1g16+e4m3*t", "w8g32o+fp32"}) {
    for (int64_t m = 1; m < 300; ++m) {
      ExpectFits({4096, 28672, ParseScheme(text).value()}, m, t4);
    }
  }
  // The rows of experts.
  for (const int64_t group : {16, 128}) {
    for (int64_t rows = 1; rows < 200; ++rows) {
      const WeightShape weight = Weight(8192, 4096, group);
      const MatmulTile tile = ChooseGroupedTile(weight, rows, t4);
      EXPECT_LE(MatmulSharedBytes({tile.tokens, 1, tile.k_ranges.per_block, 4, 1},
                                  {mma16::RecordBytes(weight)}, 1, t4),
                kTuringSharedBytes);
    }
  }
}

// So that a row has the same bits whatever the others are; and rings fit GPUs of 99, 163 and 227
// KB.
TEST(ChooseGroupedTile, HasKRangesThatDependOnTheWeightAlone) {
  for (const int64_t bytes : {101376, 166912, 232448}) {
    const DeviceInfo device = Gpu(80, 84, bytes);
    for (const int64_t group : {16, 128}) {
      for (const int64_t k : {128, 2048, 4096, 8192, 14336}) {
        const WeightShape weight = Weight(k, 4096, group);
        const FixedOrder k_ranges = ChooseGroupedTile(weight, 1, device).k_ranges;
        EXPECT_GE(k_ranges.count() * k_ranges.length, mma16::BlocksK(k));
        for (int64_t rows = 1; rows < 200; ++rows) {
          const MatmulTile tile = ChooseGroupedTile(weight, rows, device);
          EXPECT_EQ(tile.k_ranges, k_ranges);
          EXPECT_GE(tile.tokens, std::min<int64_t>(rows, 64));
          const auto variant = std::find_if(
              std::begin(kGroupedTiles), std::end(kGroupedTiles), [&](const MatmulVariant& v) {
                return v.tokens == tile.tokens && v.k_ranges == k_ranges.per_block;
              });
          ASSERT_NE(variant, std::end(kGroupedTiles)) << tile.tokens;
          EXPECT_LE(MatmulSharedBytes(*variant, {mma16::RecordBytes(weight)}, 1, device), bytes);
        }
      }
    }
  }
}

TEST(MatmulPrefetch, LeavesRoomForTheActivationsUnlessBlocksComeInWaves) {
  const auto prefetch = [](int64_t k, int64_t n, int64_t m) {
    return MatmulPrefetch(ChooseMatmulTile(Weight(k, n), m, H100()), m, n, false, H100());
  };
  EXPECT_EQ(prefetch(8192, 8192, 1), 2);
  EXPECT_EQ(prefetch(8192, 8192, 16), 1);
  const MatmulTile staged = ChooseMatmulTile(Weight(8192, 8192), 16, H100());
  EXPECT_GE(MatmulPrefetch(staged, 16, 8192, true, H100()), 4) << "there is time for more";
  EXPECT_GE(prefetch(8192, 10240, 1), 4) << "the whole ring, in clusters as well";
  for (const MatmulVariant& variant : MatmulVariants(Weight(8192, 57344), DType::kFp16)) {
    EXPECT_GE(prefetch(8192, 57344, variant.tokens), variant.stages) << "the whole ring";
  }
}

TEST(MatmulLaunchBytes, SpreadsBlocksEvenly) {
  const MatmulVariant& variant = MatmulVariants(Weight(4096, 4096), DType::kFp16)[0];
  const int record = mma16::RecordBytes(4, 1);
  // One block each: too large for a second one.
  EXPECT_GT(2 * (MatmulLaunchBytes(variant, {record}, 128, 2, H100()) + 1024), 233472);
  // Two each: two fit, three do not.
  const int64_t two = MatmulLaunchBytes(variant, {record}, 200, 1, H100());
  EXPECT_LE(2 * (two + 1024), 233472);
  EXPECT_GT(3 * (two + 1024), 233472);
  // Many: exactly the kernel's need.
  EXPECT_EQ(MatmulLaunchBytes(variant, {record}, 100000, 1, H100()),
            MatmulSharedBytes(variant, {record}, 1, H100()));
  for (const WeightShape& weight : EveryKind()) {
    for (const MatmulVariant& v : MatmulVariants(weight, DType::kFp16)) {
      EXPECT_LE(MatmulLaunchBytes(v, {mma16::RecordBytes(weight)}, 1, 1, H100()), 232448);
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
