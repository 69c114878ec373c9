// What the parts of the persistent product's kernel share: the configuration of an instantiation,
// the ring in shared memory, the place of a tile.
#pragma once

#include "kernels/cuda/sm90a/bulk.cuh"
#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

constexpr int kWarpgroupThreads = 128;

// Of a thread, by the consumers of its block.
constexpr int ConsumerRegisters(int consumers) {
  return consumers <= 2 ? 232 : consumers == 3 ? 160 : 112;
}
constexpr int ProducerRegisters(int consumers) {
  return consumers <= 2 ? 40 : consumers == 3 ? 32 : 24;
}

// What an instantiation of the kernel is compiled for: the arithmetic of the activations' type, a
// kind of records, a tile, and whether the order of sums is kept.
template <class Math_, RecordKind kKind, bool kChained_, PersistentTile kTile>
struct PersistentConfig {
  using Math = Math_;
  // Per record: 1, 2, or at most 8, which a call tells.
  static constexpr int kMetas = MostMetas(kKind);
  // Groups of K shorter than 64: the scales change within a lane's 16 bytes.
  static constexpr bool kFine = kMetas > 2;
  static constexpr int kTokens = kTile.tokens;
  static constexpr int kRecords = kTile.records;  // side by side, of 64 features each
  static constexpr int kCluster = kTile.cluster;
  static constexpr int kParts = kTile.parts;  // of a tile along K, a block of a cluster each
  static_assert(kCluster == 1 || kParts == 1);
  static constexpr int kSlices = kTile.slices;  // of a part along K, consumers of one block
  static_assert(kSlices == 1 || kParts > 1);
  static constexpr int kConsumers = kRecords * kSlices;  // warpgroups
  // Keeps the order of sums of common/chains.h.
  static constexpr bool kChained = kChained_;
  // Whether the chains of a part, but for its last, are put down in global memory.
  static constexpr bool kPutsDown = kTile.sets == 0;
  static constexpr int kSets = kPutsDown ? 1 : kTile.sets;  // of sums in a thread's registers
  static_assert(kTile.sets == 1 || (kChained && kParts > 1));
  static_assert(!kPutsDown || (kParts == 2 && kSlices == 1));
  static constexpr bool kFirstAddsUp = kPutsDown && PersistentFirstAddsUp(kRecords);
  // Registers have room for one chain alone.
  static constexpr bool kParks = kChained && PersistentParks(kTokens);
  // Whether a warp of its own announces what consumers put down: 4096 x 28672 at 64 tokens 33.7 us
  // -> 32.9, 8192 x 10240 25.4 -> 24.8 (H100, 2026-11-23); from 96 tokens on nothing.
  static constexpr bool kAnnounces = !kChained && kParts == 1 && kTokens <= 64;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  // Consumers hold the sums. A block trades within the registers that it was started with.
  static constexpr int kStartRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kConsumerRegisters = ConsumerRegisters(kConsumers);
  static constexpr int kProducerRegisters = ProducerRegisters(kConsumers);
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <=
                (kConsumers + 1) * kStartRegisters);
  static constexpr int kSlotBytes = SlotBytes(kTile, kKind);
  static constexpr int kSlots = RingSlots(kTile, kKind);
  static constexpr int kSharedBytes = SharedBytes(kTile, kKind);
  static constexpr int kTokenBytes = kTokens * mma16::kBlockK * 2;
  static constexpr int kSums = kTokens / 2;
};

// Addresses in shared memory: the tokens of every slot, their records, the barriers.
template <class Config>
struct Ring {
  uint32_t base;
  int record_bytes;

  __device__ __forceinline__ uint32_t Tokens(int slot) const {
    return base + slot * Config::kTokenBytes;
  }
  __device__ __forceinline__ uint32_t Record(int slot, int record) const {
    return base + Config::kSlots * Config::kTokenBytes +
           (slot * Config::kRecords + record) * record_bytes;
  }
  __device__ __forceinline__ uint32_t Full(int slot) const {
    return base + Config::kSlots * Config::kSlotBytes + slot * 16;
  }
  __device__ __forceinline__ uint32_t Empty(int slot) const { return Full(slot) + 8; }
  // Counts the consumers of all parts that are through with their rings, then the bytes of sums
  // that came.
  __device__ __forceinline__ uint32_t Through() const { return Full(Config::kSlots); }
  __device__ __forceinline__ uint32_t Arrived() const { return Through() + 8; }
};

// A position in the ring: the slot and how often it was passed.
template <class Config>
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++slot == Config::kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Steps of every slice of a part but perhaps its last. The steps of the slices alternate in the
// ring, so that each has every kSlices-th slot of it.
template <class Config>
__device__ __forceinline__ int SliceSteps(const PersistentParams& p, const Piece& piece) {
  if (Config::kSlices == 1) return piece.end - piece.begin;
  return (p.schedule.part_steps + Config::kSlices - 1) / Config::kSlices;
}

// Where a tile lies in the output. Token tiles run fastest within a band of them, so that the tiles
// in flight at a time share both their weights and their tokens in L2.
struct TilePlace {
  int columns;  // cluster tiles along N
  int tokens;   // token tiles
};

__device__ __forceinline__ TilePlace PlaceOf(int tile, int token_tiles, int column_tiles) {
  constexpr int kBand = 8;
  const int band = tile / (kBand * column_tiles);
  const int height = min(kBand, token_tiles - band * kBand);
  const int within = tile - band * kBand * column_tiles;
  return {within / height, band * kBand + within % height};
}

// Per record.
template <class Config>
__device__ __forceinline__ int Metas(const PersistentParams& p) {
  return Config::kFine ? p.metas : Config::kMetas;
}

template <class Config>
__device__ __forceinline__ int ColumnTiles(const PersistentParams& p) {
  constexpr int kPerCluster = Config::kCluster * Config::kRecords;
  return (p.tiles_n + kPerCluster - 1) / kPerCluster;
}

// What a thread of a consumer accumulates: for each eight tokens the fragment of an m16n8
// product.
template <class Config>
using Sums = float[Config::kSums];

template <class Config>
__device__ __forceinline__ void Clear(Sums<Config>& sums) {
#pragma unroll
  for (int i = 0; i < Config::kSums; ++i) sums[i] = 0;
}

}  // namespace
}  // namespace awqd::cuda
