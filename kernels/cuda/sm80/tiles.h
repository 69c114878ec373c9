// The tiles of the fused product that are compiled, and the choice among them: host arithmetic over
// a problem and a device, so that it is tested with invented devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "absl/types/span.h"
#include "kernels/cuda/common/fixed_order.h"
#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/layouts/mma16.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd::cuda {

// ---- The lists that kernels are compiled from ---------------------------------------------------

// One compiled variant: a kernel for one (tokens, row_tiles, k-ranges).
struct MatmulVariant {
  int tokens;
  int row_tiles;
  int k_ranges;  // of K in a block: a consumer, four warps, each
  int stages;    // depth of each consumer's ring in shared memory
  int blocks;    // blocks that should fit a multiprocessor: bounds the registers

  friend bool operator==(const MatmulVariant&, const MatmulVariant&) = default;
};

// The slots of a ring, whatever a tile says, where copies wait in registers (ring.cuh):
// one is filled while the other is read. And the shared memory of a multiprocessor there, all of
// which a block may have.
inline constexpr int kHeldSlots = 2;
inline constexpr int kTuringSharedBytes = 65536;

// Each list is in ascending order of tokens, then of row tiles for as many k-ranges.
//
// 4-bit codes in groups of 128 and more, or of all of K. They fit 227 KB up to 48 tokens; from
// there on, where Hopper takes another row, 163 KB. H100, 2026-11-21: a register bound that spills
// costs most: 32 tokens of 4096 x 28672 took 50.5 us with three blocks of two row tiles, 36.7 with
// two. Four k-ranges have a multiprocessor to themselves (common/fixed_order.h), and the registers:
// BF16, one token of 28672 x 8192 48.2 us, with room for two blocks 51.8. Where blocks are more
// than three for each, there are two row tiles or many waves of them, and registers are worth more
// than a fourth block: BF16, one token of 8192 x 57344 93.4 us instead of 101.4.
inline constexpr MatmulVariant kTiles4[] = {
    {8, 1, 2, 4, 2},   {8, 2, 2, 3, 3},   {8, 1, 4, 4, 1},  {16, 1, 2, 3, 4}, {16, 2, 2, 3, 2},
    {16, 1, 4, 3, 1},  {24, 1, 2, 3, 3},  {24, 2, 2, 3, 2}, {24, 1, 4, 3, 1}, {32, 1, 2, 3, 3},
    {32, 2, 2, 3, 2},  {32, 1, 4, 3, 1},  {48, 1, 2, 3, 2}, {48, 2, 2, 2, 2}, {48, 1, 4, 3, 1},
    {64, 1, 2, 2, 2},  {64, 2, 2, 2, 2},  {64, 1, 4, 2, 1}, {96, 1, 2, 2, 1}, {96, 2, 2, 2, 1},
    {128, 1, 2, 2, 1}, {128, 2, 2, 2, 1},
};
// 4-bit codes in shorter groups: the others are rounded up to these.
inline constexpr MatmulVariant kFewTiles4[] = {
    {8, 1, 2, 4, 2},  {8, 2, 2, 3, 3},  {8, 1, 4, 4, 1},   {16, 1, 2, 3, 4},
    {16, 2, 2, 3, 2}, {16, 1, 4, 3, 1}, {32, 1, 2, 3, 3},  {32, 1, 4, 3, 1},
    {64, 1, 2, 2, 2}, {64, 1, 4, 2, 1}, {128, 1, 2, 2, 1},
};
// 5- to 8-bit codes: records are up to twice as large.
inline constexpr MatmulVariant kTiles8[] = {
    {8, 1, 2, 4, 2},  {8, 2, 2, 3, 1},  {8, 1, 4, 4, 1},  {16, 1, 2, 3, 3},
    {16, 2, 2, 3, 1}, {16, 1, 4, 3, 1}, {32, 1, 2, 2, 2}, {32, 1, 4, 2, 1},
    {64, 1, 2, 2, 2}, {64, 1, 4, 2, 1}, {96, 1, 2, 2, 1},
};
// 1 to 3 bits: records are small, so more of them have to be under way.
inline constexpr MatmulVariant kNarrowTiles[] = {
    {8, 1, 2, 6, 2},  {8, 2, 2, 4, 3},  {8, 1, 4, 6, 1},   {16, 1, 2, 4, 3},
    {16, 2, 2, 4, 2}, {16, 1, 4, 4, 1}, {32, 1, 2, 3, 3},  {32, 1, 4, 3, 1},
    {64, 1, 2, 2, 2}, {64, 1, 4, 2, 1}, {128, 1, 2, 2, 1},
};

// INT8 activations, codes of any width. Tokens take half the room, sums of integers beside those in
// FP32 twice the registers.
inline constexpr MatmulVariant kInt8Tiles[] = {
    {8, 1, 2, 4, 2},  {8, 2, 2, 3, 3},  {8, 1, 4, 4, 1},   {16, 1, 2, 3, 3},
    {16, 2, 2, 3, 2}, {16, 1, 4, 3, 1}, {32, 1, 2, 3, 2},  {32, 1, 4, 3, 1},
    {64, 1, 2, 2, 1}, {64, 1, 4, 2, 1}, {128, 1, 2, 2, 1},
};

// E2M1, E4M3 and tables of 16. There are no tiles of more tokens: from 256 on decoding first is
// faster (H100, 14336 x 4096, 256 tokens: 163 to 197 us, 2.8 to 3.4 times cuBLASLt's time).
inline constexpr MatmulVariant kFloatTiles[] = {
    {8, 1, 2, 4, 2},  {8, 2, 2, 3, 2},  {8, 1, 4, 4, 1},  {16, 1, 2, 3, 3}, {16, 2, 2, 3, 2},
    {16, 1, 4, 3, 1}, {32, 1, 2, 2, 2}, {32, 1, 4, 2, 1}, {64, 1, 2, 2, 2}, {64, 1, 4, 2, 1},
};

// E4M3 activations. A block of the GPUs that these are for has 99 KB.
inline constexpr MatmulVariant kFloat8Tiles[] = {
    {8, 1, 2, 4, 2},  {8, 2, 2, 3, 2},  {8, 1, 4, 4, 1},  {16, 1, 2, 3, 2}, {16, 2, 2, 3, 2},
    {16, 1, 4, 3, 1}, {32, 1, 2, 2, 2}, {32, 1, 4, 2, 1}, {64, 1, 2, 2, 1}, {128, 1, 2, 2, 1},
};

// Integer codes with real zeros, activations of 16 bits and INT8. Few weights have them, so there
// are the fewest tiles that serve them well.
inline constexpr MatmulVariant kRealTiles[] = {
    {8, 1, 2, 4, 2},  {8, 1, 4, 4, 1},  {16, 1, 2, 3, 3}, {16, 2, 2, 3, 2},
    {16, 1, 4, 3, 1}, {64, 1, 2, 2, 1}, {64, 1, 4, 2, 1},
};

// Grouped products. Experts fill the GPU together, so K is not cut among blocks: two k-ranges in a
// block, four where K is long. A tile holds rows of one expert.
inline constexpr MatmulVariant kGroupedTiles[] = {
    {8, 1, 2, 4, 3},  {8, 1, 4, 4, 1},  {16, 1, 2, 3, 3}, {16, 1, 4, 3, 1},
    {32, 1, 2, 3, 3}, {32, 1, 4, 3, 1}, {64, 1, 2, 2, 2}, {64, 1, 4, 2, 1},
};

// sm80/qmatmul_a16_scaled_sums is compiled for up to so many tokens. What it costs to scale sums
// grows with the tokens, what it saves in decoding weights does not.
inline constexpr int kMostTokensOfScaledSums = 16;

// The tiles of sm80/stream_k.cuh, in ascending order of tokens. A block has two buffers for the
// sums of all its consumers: one is filled while the other is read.
inline constexpr int kStreamKBuffers = 2;
inline constexpr MatmulVariant kStreamKTiles[] = {{8, 1, 4, 4, 1}, {16, 1, 5, 3, 1}};
static_assert(kStreamKTiles[1].tokens == kMostTokensOfScaledSums);

// The number of metas that a kernel is compiled for and that serves records of `metas`. Kernels for
// 4 and 8 metas learn the exact number from the call. Integers have kernels for 1 and 8 metas; 8
// bits also for 0; 4 bits, which most weights have, also for 2 where sums are scaled (not `exact`).
// E2M1 has kernels for 4 and 8, E4M3 for 0, 1 and 8, tables for 2 and 8, real zeros for 4 and 8.
constexpr int CompiledMetas(CodeKind code, bool real_zeros, int bits, int metas,
                            bool exact = false) {
  if (real_zeros) return metas <= 4 || mma16::RealZerosRows(bits) == 32 ? 4 : 8;
  switch (code) {
    case CodeKind::kE2m1:
      return metas <= 4 ? 4 : 8;
    case CodeKind::kE4m3:
      return metas <= 1 ? metas : 8;
    case CodeKind::kTable:
      return metas == 2 ? metas : 8;
    default:
      if (metas <= 1) return bits == 8 ? metas : 1;
      return metas == 2 && bits == 4 && !exact ? 2 : 8;
  }
}

// kBytes: activations are INT8, or E4M3.
template <class Record, bool kBytes, bool kGrouped>
constexpr auto& TilesOf() {
  constexpr int kBits = Record::kBits, kMetas = Record::kMetas;
  if constexpr (kGrouped) {
    return kGroupedTiles;
  } else if constexpr (Record::kReal) {
    return kRealTiles;
  } else if constexpr (Record::kCode != CodeKind::kUnsigned && kBytes) {
    return kFloat8Tiles;
  } else if constexpr (Record::kCode != CodeKind::kUnsigned) {
    return kFloatTiles;
  } else if constexpr (kBytes) {
    return kInt8Tiles;
  } else if constexpr (kBits > 4) {
    return kTiles8;
  } else if constexpr (kBits < 4) {
    return kNarrowTiles;
  } else if constexpr (kMetas == 1) {
    return kTiles4;
  } else {
    return kFewTiles4;
  }
}

// ---- The choice ---------------------------------------------------------------------------------

// A block computes 64 * row_tiles out features x `tokens` tokens over its k-ranges.
struct MatmulTile {
  int tokens = 8;
  int row_tiles = 1;
  // One per consumer, k_ranges.per_block of these per block, k_ranges.splits blocks in a cluster.
  FixedOrder k_ranges;

  friend bool operator==(const MatmulTile&, const MatmulTile&) = default;
};

// The tiles that are compiled for weights like this one and activations of dtype `x`.
absl::Span<const MatmulVariant> MatmulVariants(const WeightShape& shape, DType x);

// Floats between the tokens of a k-range's sums in shared memory: 4 more than the rows, so that a
// warp's fragments meet no bank twice.
constexpr int SumStride(int rows) { return rows + 4; }

// For the barrier of the sums of a cluster, before them.
inline constexpr int kReductionBarrierBytes = 16;

// The bytes of a record (layouts/mma16.h) and of an element of activations in a block's ring.
struct RingBytes {
  int record = 0;
  int x = 2;
  int scale = 0;  // of a token
  int table = 0;  // in front of all rings: where codes index a table, that of their pairs
};
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
// the prologue ran just before (`after_prologue`): there is more time to fill.
int MatmulPrefetch(const MatmulTile& tile, int64_t m, int64_t n, bool after_prologue,
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
