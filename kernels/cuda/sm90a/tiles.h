// The tiles of the fused product and the choice among them. It is host arithmetic on a weight's
// shape, a number of tokens and a device, so tests run it with invented devices. NOTES.md begins
// with a picture and explains the words.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/cuda/common/stream_k_schedule.h"
#include "kernels/layouts/mma16.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd::cuda {

// A tile of y: what a thread block computes at a time, `tokens` rows of y x 64 * records columns.
// A record of the weight is 64 columns wide; one consumer, a warpgroup of four warps, decodes it
// and multiplies. With `cluster` > 1 the cluster's tile has as many times the columns.
struct PersistentTile {
  int tokens = 256;
  int records = 2;  // side by side along N, in one block
  // Blocks of a cluster that lie side by side along N. They need the same tokens: each block loads
  // some of them and writes these into the shared memory of all (multicast).
  int cluster = 2;
  // Split-K: the tile's K is divided among this many blocks of a cluster. They add up their sums
  // through each other's shared memory. Either `splits` or `cluster` is 1.
  int splits = 1;
  // Only in fixed order (common/fixed_order.h) with splits > 1: how many accumulators a thread has
  // in registers, one for each k-range. The weight must then have exactly splits * slices *
  // accumulators k-ranges. 0: any number of k-ranges; a split stores all but its last.
  int accumulators = 1;
  // Sliced-K: a split's K is divided among this many consumers of its block. A narrow tile has so
  // little arithmetic in a step that one consumer, waiting for each load, is slower than memory;
  // two hide each other's waits.
  int slices = 1;

  friend bool operator==(const PersistentTile&, const PersistentTile&) = default;
};

// Whether a tile is always data parallel. A block with one record reads more tokens than L2 can
// give to all blocks, unless it gives the same to many at once: to those that go through K together
// (4096 x 4096 at 4096 tokens, {208, 1, 1}, stream-K: 285 us instead of 180; H100, 2026-11-26).
constexpr bool StaysWhole(const PersistentTile& tile) {
  return tile.records == 1 && tile.cluster == 1 && tile.splits == 1;
}

// A kernel is compiled for one kind: the codes of its records, and how many metas (scales and zero
// points, layouts/mma16.h) a record has.
struct RecordKind {
  CodeKind code = CodeKind::kUnsigned;
  int bits = 4;
  int metas = 1;            // 0, 1, 2, or 8: any number up to that, known at run time
  bool real_zeros = false;  // mma16::HasRealZeros
  // For E2M1: scales of more than the four bits that E4M3 and E8M0 have. BF16 does not hold their
  // products.
  bool long_scales = false;

  friend bool operator==(const RecordKind&, const RecordKind&) = default;
};
constexpr RecordKind Integers(int bits, int metas) { return {CodeKind::kUnsigned, bits, metas}; }
constexpr RecordKind RealZeros(int bits) { return {CodeKind::kUnsigned, bits, 8, true}; }
constexpr RecordKind E4m3(int metas) { return {CodeKind::kE4m3, 8, metas}; }
inline constexpr RecordKind kE2m1 = {CodeKind::kE2m1, 4, 8};
inline constexpr RecordKind kE2m1LongScales = {CodeKind::kE2m1, 4, 8, false, true};
inline constexpr RecordKind kTable = {CodeKind::kTable, 4, 8};

// The kind that serves a weight. Nearly all weights of 4 bits have one meta (groups of 128 and its
// multiples, or of all of K), nearly all of 8 bits none (a scale for each column).
RecordKind KindOf(const WeightShape& shape);

// Whether kernels are compiled for such records.
constexpr bool IsCompiled(const RecordKind& kind) {
  return kind.code != CodeKind::kUnsigned || kind.bits != 7 || !kind.real_zeros;
}

// The tiles that are compiled for weights of this shape and activations of dtype `x`.
std::vector<PersistentTile> PersistentTiles(const WeightShape& shape, DType x = DType::kFp16);

// Room for the FP32 scales of a tile's tokens. They are copied from an address that is a multiple of
// 16, which may be up to three tokens before the first.
constexpr int TokenScalesBytes(int tokens) { return tokens * 4 + 16; }

// A slot of the ring holds one step, 128 of K: the tokens, those of E4M3 with a scale each, and the
// records. A record of 4 bits and one meta is given the room of two, so that both kinds have as
// many slots.
constexpr int SlotBytes(const PersistentTile& tile, const RecordKind& kind,
                        DType x = DType::kFp16) {
  const int metas = kind == Integers(4, 1) ? 2 : kind.metas;
  return tile.tokens * mma16::kBlockK * static_cast<int>(SizeOf(x)) +
         (x == DType::kE4m3 ? TokenScalesBytes(tile.tokens) : 0) +
         tile.records *
             mma16::RecordBytes(kind.bits, metas, mma16::MetaKindOf(kind.code, kind.real_zeros));
}

// As many slots as fit the shared memory of sm_90: 228 KB, less 1 KB that CUDA takes for each
// block, a table's pairs, two barriers of 8 bytes for each slot and two more for the block. More
// than 16 slots gain nothing. A multiple of `slices`, because every slice has as many slots as the
// others.
constexpr int RingSlots(const PersistentTile& tile, const RecordKind& kind,
                        DType x = DType::kFp16) {
  const int room = 227 * 1024 - 16 - PairTableBytes(kind.code);
  const int slots = room / (SlotBytes(tile, kind, x) + 16);
  return (slots < 16 ? slots : 16) / tile.slices * tile.slices;
}

constexpr int SharedBytes(const PersistentTile& tile, const RecordKind& kind,
                          DType x = DType::kFp16) {
  return PairTableBytes(kind.code) + RingSlots(tile, kind, x) * (SlotBytes(tile, kind, x) + 16) +
         16;
}

// In fixed order a consumer needs two accumulators: of the k-range that it computes, and the total
// of the k-ranges before. True where registers have room for one only; the total is then kept in
// global memory ("parked"). With 176 and 192 tokens both fit, but the compiler keeps some of the
// total in local memory between k-ranges.
constexpr bool PersistentParks(int tokens) { return tokens > 192; }

// Where `accumulators` is 0: whether the first split has registers for a total, so that it can add
// each k-range to it at once. With three records it has not.
constexpr bool PersistentFirstAddsUp(int records) { return records <= 2; }

// Whether sums of INT8 products stay INT32 up to the last step: no scale changes along K, and where
// there are scales 2^31 is not passed.
bool SumsStayIntegers(const WeightShape& shape);

// Floats of the partials of a block.
constexpr int64_t PersistentSlotFloats(const PersistentTile& tile) {
  return int64_t{tile.tokens} * tile.records * mma16::kTileN;
}

// The work units. Uses fewer clusters than the device holds where each then has equally many steps.
StreamKSchedule PersistentSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                                   const DeviceInfo& device);

// The same for a grouped product of so many tiles of tokens.
StreamKSchedule GroupedSchedule(const WeightShape& shape, int64_t token_tiles,
                                const PersistentTile& tile, const DeviceInfo& device);

// How many tokens a block copies: of a full tile, and of the last tile of m tokens.
constexpr int TokenRows(const PersistentTile& tile) { return tile.tokens / tile.cluster; }
int LastTokenRows(int64_t m, const PersistentTile& tile);

// How far apart the first of these are, of two blocks of a cluster. Less than LastTokenRows where
// the second block would otherwise copy many rows past the last token, which the copy engine fills
// with zeros: it then copies some tokens of the first once more. {32, 2, 2}, 4096 x 28672, H100,
// 2026-11-26: 17 tokens took 30.5 us and 24 took 28.6.
int LastTokenStride(int64_t m, const PersistentTile& tile);

// Bytes for the partials of stream-K tiles, enough for every tile; a multiple of 256.
int64_t PersistentSumsBytes(const DeviceInfo& device);

// The tile that the cost model (tile_costs.h) expects to be the fastest for activations of dtype
// `x`.
PersistentTile ChoosePersistentTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                    DType x = DType::kFp16);

// Every tile that ChoosePersistentTile chooses from, with the time that the model expects.
// `awqd_bench --tiles` compares it with measurements.
struct RatedTile {
  PersistentTile tile;
  double microseconds = 0;
  double steps_us = 0;  // the part of it that grows with the number of steps
};
std::vector<RatedTile> RatePersistentTiles(const WeightShape& shape, int64_t m,
                                           const DeviceInfo& device, DType x);

// The tile that the model expects to be the fastest for a grouped product. `token_tiles`: how many
// tiles its rows make, of so many tokens each.
PersistentTile ChooseGroupedTile90(const WeightShape& shape, const DeviceInfo& device, DType x,
                                   absl::FunctionRef<int64_t(int64_t tokens)> token_tiles);

// The same in fixed order (common/fixed_order.h). FixedOrderSlots: how many partials a consumer may
// have in global memory at a time.
std::vector<PersistentTile> FixedOrderTiles(const WeightShape& shape);
StreamKSchedule FixedOrderSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                                   const DeviceInfo& device);
int FixedOrderSlots(const StreamKSchedule& schedule, int k_range, const PersistentTile& tile);
int64_t FixedOrderSumsBytes(const WeightShape& shape, const DeviceInfo& device);
PersistentTile ChooseFixedOrderTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                    DType x = DType::kFp16);
std::vector<RatedTile> RateFixedOrderTiles(const WeightShape& shape, int64_t m,
                                           const DeviceInfo& device, DType x);

}  // namespace awqd::cuda
