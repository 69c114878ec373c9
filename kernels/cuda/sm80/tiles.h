// Chooses the tile of the fused product: host arithmetic over a problem and a device, so that it
// is tested with invented devices.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/cuda/common/fixed_order.h"
#include "kernels/cuda/common/pair_table.h"
#include "kernels/cuda/sm80/tile_list.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd::cuda {

// A block computes 64 * row_tiles out features x `tokens` tokens over its k-ranges.
struct MatmulTile {
  int tokens = 8;
  int row_tiles = 1;
  // One per consumer, k_ranges.per_block of these per block, k_ranges.splits blocks in a cluster.
  FixedOrder k_ranges;

  friend bool operator==(const MatmulTile&, const MatmulTile&) = default;
};

// What is compiled for weights like this one and activations of dtype `x`.
absl::Span<const MatmulVariant> MatmulVariants(const WeightShape& shape, DType x);

// Floats between the tokens of a k-range's sums in shared memory: 4 more than the rows, so that a
// warp's fragments meet no bank twice.
constexpr int SumStride(int rows) { return rows + 4; }

// For the barrier of the sums of a cluster, before them.
inline constexpr int kReductionBarrierBytes = 16;

// What a block's ring is made of: records, as in mma16.h, and elements of activations.
struct RingBytes {
  int record = 0;
  int x = 2;
  int table = 0;  // in front of all rings: where codes index a table, that of their pairs
};
constexpr int PairTableBytes(CodeKind code) {
  return code == CodeKind::kTable ? kPairTableBytes : 0;
}
// For activations of dtype `x`.
RingBytes RingBytesOf(const WeightShape& shape, DType x);

// Dynamic shared memory of a block. The rings of its consumers and, where `splits` blocks of a
// cluster share the k-ranges, the sums that it gets of all of them.
int64_t MatmulSharedBytes(const MatmulVariant& variant, RingBytes bytes, int splits,
                          const DeviceInfo& device);

// Dynamic shared memory that a launch of `blocks` blocks asks for: so much that no multiprocessor
// takes more than its even share. A kernel that starts under the tail of the one before would
// otherwise be packed onto the multiprocessors that are free first, and run at half speed there.
int64_t MatmulLaunchBytes(const MatmulVariant& variant, RingBytes bytes, int64_t blocks, int splits,
                          const DeviceInfo& device);

// Records of each k-range, at most what the ring holds, that a block brings into L2 before it may
// read the activations, which the kernel before may still be writing. They then wait behind these:
// H100, 2026-11-22, 8192 x 8192, with 1, 2, 4 and 6 records one token takes 14.0, 13.7, 14.1
// and 14.6 us, with 1, 2, 3 and 6 16 tokens 15.7, 15.9, 16.4 and 17.0. Where blocks are more than
// the multiprocessors it is the other way round: with 1, 2 and 4 one token of 8192 x 57344 takes
// 94.4, 93.7 and 87.1 us, with 1, 2 and 4 of 8192 x 10240 19.0, 18.7 and 18.1. And where
// activations are `staged` by the kernel before: there is more time to fill.
int MatmulPrefetch(const MatmulTile& tile, int64_t m, int64_t n, bool staged,
                   const DeviceInfo& device);

// For activations of dtype `x`. The k-ranges are the same for all of them.
MatmulTile ChooseMatmulTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                            DType x = DType::kFp16);

// The blocks of a product of m <= kMostTokensOfScaledSums tokens by sm80/stream_k.cuh: one for each
// multiprocessor. 0 where it would not take less time, or does not fit.
int StreamKBlocks(const WeightShape& shape, int64_t m, const DeviceInfo& device);

// Dynamic shared memory of such a block: the rings of its consumers, two buffers for the sums of
// them all, and a barrier for each buffer.
int64_t StreamKSharedBytes(const MatmulVariant& variant, RingBytes bytes);

// For a grouped product in which an expert has `rows` rows on average. The k-ranges depend on K
// alone, and the device, so a row has the same bits whatever the others are.
MatmulTile ChooseGroupedTile(const WeightShape& shape, int64_t rows, const DeviceInfo& device);

}  // namespace awqd::cuda
