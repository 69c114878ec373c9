// Tile choice of the fused product.
#include "kernels/cuda/sm80/tiles.h"

#include <algorithm>

#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

// LaunchTile in qmatmul_a16w4.cuh compiles exactly these. H100, 2026-11-21: depths and block counts
// fill 227 KB; a register bound that spills costs most: {32, 2, 1, 4, 3} took 50.5 us for 32 tokens
// of 4096 x 28672, two blocks instead of three 36.7. Clusters of four or more instead of two: 8.5
// us at 4096 x 4096 instead of 7.3.
constexpr MatmulVariant kVariants[] = {
    {8, 1, 1, 8, 4},  {8, 2, 1, 6, 3},   {8, 1, 2, 6, 2},   {16, 1, 1, 6, 4},  {16, 2, 1, 5, 3},
    {16, 1, 2, 6, 2}, {24, 1, 1, 5, 3},  {24, 2, 1, 4, 2},  {24, 1, 2, 5, 1},  {32, 1, 1, 5, 3},
    {32, 2, 1, 4, 2}, {32, 1, 2, 5, 1},  {48, 1, 1, 4, 2},  {48, 2, 1, 4, 2},  {48, 1, 2, 4, 1},
    {64, 1, 1, 4, 2}, {64, 2, 1, 4, 2},  {64, 1, 2, 4, 1},  {96, 1, 1, 4, 1},  {96, 2, 1, 3, 1},
    {96, 1, 2, 3, 1}, {128, 1, 1, 4, 1}, {128, 2, 1, 3, 1}, {128, 1, 2, 3, 1},
};

// Slices shorter than this spend more on joining than they gain.
constexpr int64_t kMinBlocksPerSlice = 4;
// The largest cluster that every device must accept.
constexpr int kMaxSplit = 8;

bool Fits(const MatmulVariant& variant, int metas, const DeviceInfo& device) {
  return MatmulSharedBytes(variant, metas) <= device.shared_bytes_per_block;
}

}  // namespace

absl::Span<const MatmulVariant> MatmulVariants() { return kVariants; }

int64_t MatmulSharedBytes(const MatmulVariant& variant, int metas) {
  const int64_t stage =
      variant.row_tiles * mma16::RecordBytes(metas) + variant.tokens * mma16::kBlockK * 2;
  return variant.groups * variant.stages * stage;
}

int MatmulSplit(int64_t k, int64_t n, const DeviceInfo& device) {
  if (device.arch < 90 || CeilDiv(n, 2 * mma16::kTileN) * 10 >= int64_t{9} * device.sm_count) {
    return 1;
  }
  // Two slices cost next to nothing: a pair of neighbouring multiprocessors always has room for a
  // pair of blocks. Larger clusters leave multiprocessors empty, so they are for small N only.
  const int64_t tiles = CeilDiv(n, mma16::kTileN);
  int split = 1;
  while (split < kMaxSplit && (split == 1 || tiles * split * 10 < int64_t{9} * device.sm_count) &&
         mma16::BlocksK(k) / (2 * split) >= kMinBlocksPerSlice) {
    split *= 2;
  }
  return split;
}

int MatmulGroups(const WeightShape& shape, const DeviceInfo& device) {
  const int split = MatmulSplit(shape.k, shape.n, device);
  const int metas = mma16::MetasPerRecord(shape.k, shape.scheme.group_size);
  // One block of 8 warps per multiprocessor is two warps per scheduler, too few to hide the decode:
  // H100, 2026-11-21, 14336 x 4096, one token: 17.9 us with one group, 15.8 with two.
  if (mma16::TilesN(shape.n) * split > device.sm_count) return 1;
  if (mma16::BlocksK(shape.k) / (2 * split) < kMinBlocksPerSlice) return 1;
  for (const MatmulVariant& variant : kVariants) {
    if (variant.groups == 2 && !Fits(variant, metas, device)) return 1;
  }
  return 2;
}

MatmulTile ChooseMatmulTile(const WeightShape& shape, int64_t m, const DeviceInfo& device) {
  const int metas = mma16::MetasPerRecord(shape.k, shape.scheme.group_size);
  const int split = MatmulSplit(shape.k, shape.n, device);
  const int groups = MatmulGroups(shape, device);
  int tokens = kVariants[0].tokens;
  for (const MatmulVariant& variant : kVariants) {
    if (variant.groups != groups) continue;
    if (!Fits(variant, metas, device)) break;
    tokens = variant.tokens;
    if (tokens >= m) break;
  }
  // Two row tiles share each load of activations but halve the blocks: worth it once those still
  // fill the device. The smallest products want more blocks in flight, but all at once; the largest
  // take a multiprocessor each and gain most. H100, 2026-11-21: 4096 x 6144, 128 tokens, 31.4 us
  // with two and 41.0 with one; 8192 x 57344, one token, 109 with two and 90 with one.
  const int64_t blocks = CeilDiv(shape.n, 2 * mma16::kTileN) * split * CeilDiv(m, tokens);
  const int64_t tenths = blocks * 10 / std::max(1, device.sm_count);
  const bool fills = tokens <= 16 ? tenths >= 15 && tenths <= 30 : tenths >= (tokens < 96 ? 9 : 7);
  MatmulTile tile{tokens, 1, groups, split};
  for (const MatmulVariant& variant : kVariants) {
    if (fills && variant.tokens == tokens && variant.groups == groups &&
        Fits(variant, metas, device)) {
      tile.row_tiles = variant.row_tiles;
    }
  }
  return tile;
}

int64_t MatmulLaunchBytes(const MatmulVariant& variant, int metas, int64_t blocks, int split,
                          const DeviceInfo& device) {
  // Each block costs 1 KB more than it asks for, and the opt-in maximum already leaves that out.
  constexpr int64_t kReserved = 1024;
  int64_t per_sm = std::max<int64_t>(1, CeilDiv(blocks, device.sm_count));
  if (split > 2) ++per_sm;
  const int64_t share = (device.shared_bytes_per_block + kReserved) / per_sm - kReserved;
  return std::max(MatmulSharedBytes(variant, metas), share / 128 * 128);
}

}  // namespace awqd::cuda
