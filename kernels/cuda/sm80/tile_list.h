// The tiles of the fused product that are compiled: the lists that kernels are made from and that
// tiles.cc chooses from.
#pragma once

#include <cstddef>
#include <iterator>

#include "kernels/layouts/mma16.h"

namespace awqd::cuda {

// One compiled variant: a kernel for one (tokens, row_tiles, k-ranges).
struct MatmulVariant {
  int tokens;
  int row_tiles;
  int k_ranges;  // of K in a block: a consumer, four warps, each
  int stages;    // depth of each consumer's ring in shared memory
  int blocks;    // blocks that should fit a multiprocessor: bounds the registers

  friend bool operator==(const MatmulVariant&, const MatmulVariant&) = default;
};

// The slots of a ring, whatever a tile says, where copies wait in registers (common/copies.cuh):
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
// 8-bit codes: records are twice as large.
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

// Those of sm80/stream_k.cuh, in ascending order of tokens, and how many buffers for the sums of
// all consumers a block has: one is filled while the other is read.
inline constexpr int kStreamKBuffers = 2;
inline constexpr MatmulVariant kStreamKTiles[] = {{8, 1, 4, 4, 1}, {16, 1, 5, 3, 1}};
static_assert(kStreamKTiles[1].tokens == kMostTokensOfScaledSums);

// The metas of the records that serve those of `metas`. Integers have records of 0, 1 and 2, and of
// as many as a call tells, up to 8; those of 2 are told too but for 4 bits, which most weights
// have, where sums are scaled (not `exact`). E2M1 has records of 4, a scale
// for 32 rows, and 8; E4M3 of none and 1, a block; tables of 2, 64 rows. Where zeros are real there
// are 4 or fewer, and one kernel serves them.
constexpr int CompiledMetas(CodeKind code, bool real_zeros, int bits, int metas,
                            bool exact = false) {
  if (real_zeros) return 4;
  switch (code) {
    case CodeKind::kE2m1:
      return metas <= 4 ? 4 : 8;
    case CodeKind::kE4m3:
      return metas <= 1 ? metas : 8;
    case CodeKind::kTable:
      return metas == 2 ? metas : 8;
    default:
      return metas <= 1 || (metas == 2 && bits == 4 && !exact) ? metas : 8;
  }
}

template <class Record, bool kInt8, bool kGrouped>
constexpr auto& TilesOf() {
  constexpr int kBits = Record::kBits, kMetas = Record::kMetas;
  if constexpr (Record::kReal) {
    return kRealTiles;
  } else if constexpr (Record::kCode != CodeKind::kUnsigned) {
    return kFloatTiles;
  } else if constexpr (kGrouped) {
    return kGroupedTiles;
  } else if constexpr (kInt8) {
    return kInt8Tiles;
  } else if constexpr (kBits == 8) {
    return kTiles8;
  } else if constexpr (kBits < 4) {
    return kNarrowTiles;
  } else if constexpr (kMetas == 1) {
    return kTiles4;
  } else {
    return kFewTiles4;
  }
}

}  // namespace awqd::cuda
