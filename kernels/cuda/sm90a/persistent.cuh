// What the parts of the persistent product's kernel share: the configuration of an instantiation,
// the ring in shared memory, the place of a tile.
#pragma once

#include "kernels/cuda/sm90a/bulk.cuh"
#include "kernels/cuda/sm90a/qmatmul_a16w4.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

constexpr int kGroupThreads = 128;

// Of a thread.
constexpr int ConsumerRegisters(int groups, int blocks) {
  if (blocks == 1) return groups <= 2 ? 232 : 160;
  return groups == 1 ? 168 : 96;
}
constexpr int ProducerRegisters(int groups, int blocks) {
  if (blocks == 1) return groups <= 2 ? 40 : 32;
  return 48;
}

template <int kMetas_, bool kChained_, int kTokens_, int kGroups_, int kCluster_, int kBlocks_,
          int kParts_, int kSets_ = 1>
struct PersistentConfig {
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = kGroups_;  // of consumers
  static constexpr int kCluster = kCluster_;
  static constexpr int kBlocks = kBlocks_;  // that a multiprocessor has room for
  static constexpr int kParts = kParts_;    // of a tile along K, a block of a cluster each
  static_assert(kCluster == 1 || (kParts == 1 && kBlocks == 1));
  // Per record: 1, 2, or at most 8, which a call tells.
  static constexpr int kMetas = kMetas_;
  // Groups of K shorter than 64: the scales change within a lane's 16 bytes.
  static constexpr bool kFineGroups = kMetas > 2;
  // Keeps the order of sums of common/chains.h.
  static constexpr bool kChained = kChained_;
  // Whether the chains of a part, but for its last, are put down in global memory.
  static constexpr bool kPutsDown = kSets_ == 0;
  static constexpr int kSets = kPutsDown ? 1 : kSets_;  // of sums in a thread's registers
  static_assert((kSets_ != 1) == (kChained && kParts > 1));
  static_assert(!kPutsDown || kParts == 2);
  static constexpr bool kFirstAddsUp = kPutsDown && PersistentFirstAddsUp(kGroups);
  // Registers have room for one chain alone.
  static constexpr bool kParks = kChained && PersistentParks(kTokens);
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  // Consumers hold the sums. A block trades within the registers that it was started with.
  static constexpr int kStartRegisters = 65536 / kBlocks / kThreads / 8 * 8;
  static constexpr int kConsumerRegisters = ConsumerRegisters(kGroups, kBlocks);
  static constexpr int kProducerRegisters = ProducerRegisters(kGroups, kBlocks);
  static_assert(kGroups * kConsumerRegisters + kProducerRegisters <=
                (kGroups + 1) * kStartRegisters);
  static constexpr int kStageBytes = PersistentStageBytes(kTokens, kGroups, kFineGroups);
  static constexpr int kStages = PersistentStages(kTokens, kGroups, kBlocks, kFineGroups);
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
    return base + Config::kStages * Config::kTokenBytes +
           (slot * Config::kGroups + record) * record_bytes;
  }
  __device__ __forceinline__ uint32_t Full(int slot) const {
    return base + Config::kStages * Config::kStageBytes + slot * 16;
  }
  __device__ __forceinline__ uint32_t Empty(int slot) const { return Full(slot) + 8; }
  // Counts the groups of the other parts that are through with their rings, then the bytes of sums
  // that came.
  __device__ __forceinline__ uint32_t Through() const { return Full(Config::kStages); }
  __device__ __forceinline__ uint32_t Arrived() const { return Through() + 8; }
};

// A position in the ring: the slot and how often it was passed.
template <class Config>
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++slot == Config::kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

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
  return Config::kFineGroups ? p.metas : Config::kMetas;
}

template <class Config>
__device__ __forceinline__ int ColumnTiles(const PersistentParams& p) {
  constexpr int kPerCluster = Config::kCluster * Config::kGroups;
  return (p.tiles_n + kPerCluster - 1) / kPerCluster;
}

// What a thread of a consumer group accumulates: for each eight tokens the fragment of an m16n8
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
