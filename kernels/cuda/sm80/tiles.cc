// Tile choice of the fused product.
#include "kernels/cuda/sm80/tiles.h"

#include <algorithm>

#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

// The tables of qmatmul_a16w4.cuh are compiled from exactly these.
constexpr MatmulVariant kVariants[] = {
    {8, 1, 8, 4}, {16, 1, 6, 4}, {32, 2, 4, 3}, {64, 2, 4, 2}, {128, 2, 3, 1},
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
  // Sums are joined in the ring's memory once it has drained.
  const int64_t sums = int64_t{4} * variant.tokens * (variant.row_tiles * mma16::kTileN + 4);
  return std::max(variant.stages * stage, sums);
}

int MatmulSplit(int64_t k, int64_t n, const DeviceInfo& device) {
  if (device.arch < 90) return 1;
  const int64_t tiles = CeilDiv(n, 2 * mma16::kTileN);
  int split = 1;
  while (split < kMaxSplit && tiles * split * 10 < int64_t{9} * device.sm_count &&
         mma16::BlocksK(k) / (2 * split) >= kMinBlocksPerSlice) {
    split *= 2;
  }
  return split;
}

MatmulTile ChooseMatmulTile(const WeightShape& shape, int64_t m, const DeviceInfo& device) {
  const int metas = mma16::MetasPerRecord(shape.k, shape.scheme.group_size);
  const MatmulVariant* chosen = &kVariants[0];
  for (const MatmulVariant& variant : kVariants) {
    if (!Fits(variant, metas, device)) break;
    chosen = &variant;
    if (variant.tokens >= m) break;
  }
  return {chosen->tokens, chosen->row_tiles, MatmulSplit(shape.k, shape.n, device)};
}

}  // namespace awqd::cuda
