// The tiles of the fused product and the choice among them: host arithmetic over a problem and a
// device, so that it is tested with invented devices. NOTES.md begins with a picture of the words.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/sm90a/schedule.h"
#include "kernels/layouts/mma16.h"
#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd::cuda {

// The piece of y that a block, or a cluster of blocks, computes at a time: `tokens` rows of y by
// 64 * records columns for each block. One record of the weight is 64 columns wide, and a warpgroup
// of four warps, a consumer, decodes and multiplies it.
struct PersistentTile {
  int tokens = 256;
  int records = 2;  // side by side along N, in one block
  // Blocks side by side along N, in one thread block cluster. They read the same tokens, so each
  // copies its share of them into the shared memory of all.
  int cluster = 2;
  // Parts of K, one block of a cluster each: the blocks compute the same tile over different K,
  // then add up their sums through each other's shared memory. Either `parts` or `cluster` is 1.
  int parts = 1;
  // With the order of sums kept (common/chains.h) and parts > 1: chains of K that a thread keeps
  // apart in registers. The weight then has exactly parts * slices * sets chains. 0: any number of
  // chains; all but a part's last one go through global memory.
  int sets = 1;
  // Slices of a part's K, one consumer of the block each. A narrow tile has too little work in a
  // step for one consumer to keep up with memory, so two take turns at the steps.
  int slices = 1;

  friend bool operator==(const PersistentTile&, const PersistentTile&) = default;
};

// Records differ in their scales and zero points ("metas", layouts/mma16.h). A kernel is compiled
// for one kind; these are bits of a mask.
enum RecordKind : uint32_t {
  kOneMeta = 1,    // groups of 128 and its multiples, or of all of K
  kTwoMetas = 2,   // groups of 64
  kFineMetas = 4,  // groups of 16 and 32: four or eight metas, which a call tells
};
constexpr RecordKind KindOf(int metas) {
  return metas == 1 ? kOneMeta : metas == 2 ? kTwoMetas : kFineMetas;
}
// The most metas of a kind.
constexpr int MostMetas(RecordKind kind) {
  return kind == kOneMeta ? 1 : kind == kTwoMetas ? 2 : 8;
}

// What is compiled for weights like this one.
std::vector<PersistentTile> PersistentTiles(const WeightShape& shape);

// A slot of the ring holds a step, 128 of K: its tokens and its records. One meta takes the room of
// two, so that both kinds have rings of equal depth.
constexpr int SlotBytes(const PersistentTile& tile, RecordKind kind) {
  const int metas = kind == kOneMeta ? 2 : MostMetas(kind);
  return tile.tokens * mma16::kBlockK * 2 + tile.records * mma16::RecordBytes(metas);
}

// As deep as the shared memory of sm_90 (228 KB, of which each block takes 1 KB for itself) allows
// with two barriers of 8 bytes for each slot, and two more; beyond 16 slots nothing is gained.
// Every slice has as many.
constexpr int RingSlots(const PersistentTile& tile, RecordKind kind) {
  constexpr int kRoom = 227 * 1024 - 16;
  const int slots = kRoom / (SlotBytes(tile, kind) + 16);
  return (slots < 16 ? slots : 16) / tile.slices * tile.slices;
}

constexpr int SharedBytes(const PersistentTile& tile, RecordKind kind) {
  return RingSlots(tile, kind) * (SlotBytes(tile, kind) + 16) + 16;
}

// Whether a consumer that keeps the order of sums has registers for one chain alone. It then parks
// the total of the chains before in global memory. With 176 and 192 tokens the compiler keeps a
// part of the total in local memory between chains.
constexpr bool PersistentParks(int tokens) { return tokens > 192; }

// Whether the first part of a tile has registers to add its chains up as it goes, where `sets` is
// 0. With three records it has not.
constexpr bool PersistentFirstAddsUp(int records) { return records <= 2; }

// Floats of a block's sums, as it hands them over in global memory.
constexpr int64_t PersistentSlotFloats(const PersistentTile& tile) {
  return int64_t{tile.tokens} * tile.records * mma16::kTileN;
}

// Fewer clusters than fit where that makes their shares even.
Schedule PersistentSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                            const DeviceInfo& device);

// Rows of tokens that a block copies for a full tile, and for the last one.
constexpr int TokenRows(const PersistentTile& tile) { return tile.tokens / tile.cluster; }
int LastTokenRows(int64_t m, const PersistentTile& tile);

// Room for the sums of tiles that are cut along K, whatever tile is chosen; a multiple of 256.
int64_t PersistentSumsBytes(const DeviceInfo& device);

// The tile that a model of its cost, fitted to measurements, finds fastest for activations of dtype
// `x`.
PersistentTile ChoosePersistentTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                    DType x = DType::kFp16);

// Every tile among which that is chosen, with what the model gives for it: what awqd_bench --tiles
// compares with measurements.
struct RatedTile {
  PersistentTile tile;
  double microseconds = 0;
  double steps_us = 0;  // of these, what is in proportion to a step
};
std::vector<RatedTile> RatePersistentTiles(const WeightShape& shape, int64_t m,
                                           const DeviceInfo& device, DType x);

// The same for tiles that keep the order of sums of common/chains.h. `slots`: places for the sums
// of a cluster in global memory.
std::vector<PersistentTile> ChainedTiles(const WeightShape& shape);
Schedule ChainedSchedule(const WeightShape& shape, int64_t m, const PersistentTile& tile,
                         const DeviceInfo& device);
int ChainedSlots(const Schedule& schedule, int chain, const PersistentTile& tile);
int64_t ChainedSumsBytes(const WeightShape& shape, const DeviceInfo& device);
PersistentTile ChooseChainedTile(const WeightShape& shape, int64_t m, const DeviceInfo& device,
                                 DType x = DType::kFp16);
std::vector<RatedTile> RateChainedTiles(const WeightShape& shape, int64_t m,
                                        const DeviceInfo& device, DType x);

}  // namespace awqd::cuda
