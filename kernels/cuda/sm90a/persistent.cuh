// Shared by all files of the persistent kernel: the configuration of an instantiation, the
// addresses of the ring, the position of a tile in the output.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/common/float_math.cuh"
#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/sm90a/bulk.cuh"
#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

constexpr int kWarpgroupThreads = 128;

// Tokens lie in shared memory in swizzled rows: half a step of 16 bits, a step of 8.
constexpr int kTokenRowBytes = 128;

// Registers of a thread, by the number of consumers in its block.
constexpr int ConsumerRegisters(int consumers) {
  return consumers <= 2 ? 232 : consumers == 3 ? 160 : 112;
}
constexpr int ProducerRegisters(int consumers) {
  return consumers <= 2 ? 40 : consumers == 3 ? 32 : 24;
}

// Whether scales multiply the sums of a group instead of weights (ScaledSumsMath). That saves a
// thread 32 instructions a step, 64 with BF16, and costs it one for each two tokens; and registers,
// for the sums of a step beside those of all. H200, 2026-11-27, FP16: 32 tokens take 3 % less, 64
// took 1 % more; BF16: 16 % less, 64 10 % less. E4M3 saves more. It changes the order of
// operations, and so bits.
constexpr bool ScalesSums(DType x, const RecordKind& kind, bool fixed_order,
                          const PersistentTile& tile) {
  const int most_tokens = kind.code == CodeKind::kE4m3 ? 256 : x == DType::kBf16 ? 104 : 56;
  const int consumers = tile.records * tile.slices;
  const int room = consumers <= 2 ? 144 : consumers == 3 ? 72 : 32;  // tokens, by registers
  return SizeOf(x) == 2 && kind.metas == 1 && !fixed_order &&
         tile.tokens <= std::min(most_tokens, room);
}

// How fragments are decoded.
template <class Record, bool kBf16, bool kScalesSums>
using IntegerMathOf =
    std::conditional_t<kScalesSums, ScaledSumsMath<Record, kBf16>,
                       std::conditional_t<kBf16, Bf16Math<Record>, Fp16Math<Record>>>;
template <class Record, bool kBf16, bool kScalesSums>
using FloatMathOf = std::conditional_t<
    Record::kCode == CodeKind::kE2m1, E2m1Math<Record, kBf16>,
    std::conditional_t<Record::kBare, BareE4m3Math<Record, kBf16>,
                       std::conditional_t<kScalesSums, ScaledFloatsMath<Record, kBf16>,
                                          RoundedMath<Record, kBf16>>>>;
template <class Record, bool kBf16, bool kScalesSums, bool kLongScales>
using MathOf =
    std::conditional_t<Record::kCode == CodeKind::kUnsigned && !Record::kReal,
                       IntegerMathOf<Record, kBf16, kScalesSums>,
                       std::conditional_t<kLongScales && kBf16, E2m1LongScalesMath<Record>,
                                          FloatMathOf<Record, kBf16, kScalesSums>>>;

// The configuration of an instantiation of the kernel: the type of activations, a kind of records,
// a kind of product and a tile.
template <DType kX, RecordKind kKind, ProductKind kProduct, PersistentTile kTile>
struct PersistentConfig {
  using Record = cuda::Record<kKind.bits, kKind.metas, kKind.code, kKind.real_zeros>;
  // Keeps the order of sums of common/fixed_order.h.
  static constexpr bool kFixedOrder = kProduct == ProductKind::kFixedOrder;
  static constexpr bool kGrouped =
      kProduct == ProductKind::kGrouped || kProduct == ProductKind::kGroupedTokenScales;
  static constexpr bool kScalesSums = ScalesSums(kX, kKind, kFixedOrder, kTile);
  using Math = MathOf<Record, kX == DType::kBf16, kScalesSums, kKind.long_scales>;
  static constexpr DType kActivations = kX;  // bytes need no Math
  // Sums are integers modulo 2^32.
  static constexpr bool kIntegers = kProduct == ProductKind::kIntegers;
  using Sum = std::conditional_t<kIntegers, uint32_t, float>;
  static constexpr bool kTokenScales =
      kProduct == ProductKind::kTokenScales || kProduct == ProductKind::kGroupedTokenScales;
  static constexpr int kXBytes = SizeOf(kX);
  static constexpr int kTokens = kTile.tokens;
  static constexpr int kRecords = kTile.records;  // side by side along N
  static constexpr int kCluster = kTile.cluster;
  static constexpr int kSplits = kTile.splits;  // of a tile's K, one for each block of a cluster
  static_assert(kCluster == 1 || kSplits == 1);
  static constexpr int kSlices = kTile.slices;  // of a split's K, one for each consumer of a record
  static_assert(kSlices == 1 || kSplits > 1);
  static constexpr int kConsumers = kRecords * kSlices;  // warpgroups
  // Whether a split writes all its k-ranges but the last to global memory.
  static constexpr bool kStoresKRanges = kTile.accumulators == 0;
  static constexpr int kAccumulators =
      kStoresKRanges ? 1 : kTile.accumulators;  // of sums in a thread's registers
  static_assert(kTile.accumulators == 1 || (kFixedOrder && kSplits > 1));
  static_assert(!kStoresKRanges || (kSplits == 2 && kSlices == 1));
  static constexpr bool kFirstAddsUp = kStoresKRanges && PersistentFirstAddsUp(kRecords);
  // Whether registers have room for one accumulator only.
  static constexpr bool kParks = kFixedOrder && PersistentParks(kTokens);
  // Whether a warp of its own, instead of the consumer, signals stored partials. At 64 tokens
  // 4096 x 28672 takes 32.9 us instead of 33.7, 8192 x 10240 24.8 instead of 25.4 (H100,
  // 2026-11-23); from 96 tokens on nothing is gained.
  static constexpr bool kSignals = !kFixedOrder && kSplits == 1 && kTokens <= 64;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  // Consumers hold the sums, so producers give registers to them. Together they have no more than
  // the block was started with.
  static constexpr int kStartRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kConsumerRegisters = ConsumerRegisters(kConsumers);
  static constexpr int kProducerRegisters = ProducerRegisters(kConsumers);
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <=
                (kConsumers + 1) * kStartRegisters);
  static constexpr int kSlotBytes = SlotBytes(kTile, kKind, kX);
  static constexpr int kSlots = RingSlots(kTile, kKind, kX);
  static constexpr int kSharedBytes = SharedBytes(kTile, kKind, kX);
  static constexpr int kTokenBytes = kTokens * mma16::kBlockK * kXBytes;
  static constexpr int kSums = kTokens / 2;
};

// Addresses in shared memory: the tokens of all slots, then the records of all slots, then the
// scales of tokens where each step has some, then the barriers.
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
  // FP32 scales of a slot's tokens.
  __device__ __forceinline__ uint32_t TokenScales(int slot) const {
    return Full(0) - (Config::kSlots - slot) * TokenScalesBytes(Config::kTokens);
  }
  // For split-K tiles. Through: a barrier that counts the consumers, of all splits, that no longer
  // need their ring. Arrived: a barrier that counts the bytes of sums that other blocks sent.
  __device__ __forceinline__ uint32_t Through() const { return Full(Config::kSlots); }
  __device__ __forceinline__ uint32_t Arrived() const { return Through() + 8; }
};

// A position in the ring: the slot, and the parity of how often the ring was gone through.
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

// Steps of a slice; the last slice of a split may have fewer. In the ring the steps of the slices
// alternate, so that each slice has every kSlices-th slot.
template <class Config>
__device__ __forceinline__ int SliceSteps(const PersistentParams& p, const WorkUnit& work) {
  if (Config::kSlices == 1) return work.end - work.begin;
  return (p.schedule.split_steps + Config::kSlices - 1) / Config::kSlices;
}

// Where a tile lies in the output. Tiles are numbered in bands of up to eight tiles of tokens;
// within a band the tile of tokens changes fastest. So the tiles that are computed at the same time
// share weights and tokens in L2.
struct TilePlace {
  int columns;  // number of the cluster's tile along N
  int tokens;   // number of the tile of tokens
};

__device__ __forceinline__ TilePlace PlaceOf(int tile, int token_tiles, int column_tiles) {
  constexpr int kBand = 8;
  const int band = tile / (kBand * column_tiles);
  const int height = min(kBand, token_tiles - band * kBand);
  const int within = tile - band * kBand * column_tiles;
  return {within / height, band * kBand + within % height};
}

// Metas of each record.
template <class Config>
__device__ __forceinline__ int Metas(const PersistentParams& p) {
  return Config::Record::kFine ? p.metas : Config::Record::kMetas;
}

template <class Config>
__device__ __forceinline__ int ColumnTiles(const PersistentParams& p) {
  constexpr int kPerCluster = Config::kCluster * Config::kRecords;
  return (p.tiles_n + kPerCluster - 1) / kPerCluster;
}

// Whether the table of a grouped product has the tile without rows.
template <class Config>
__device__ __forceinline__ bool IsEmpty(const PersistentParams& p, const WorkUnit& work) {
  if constexpr (!Config::kGrouped) return false;
  const TilePlace place = PlaceOf(work.tile, p.token_tiles, ColumnTiles<Config>(p));
  return p.tiles[place.tokens].first_token >= p.tiles[place.tokens].end_token;
}

// The work units of a cluster but for those of empty tiles.
template <class Config>
class FilledWorkUnits {
 public:
  __device__ __forceinline__ FilledWorkUnits(const PersistentParams& p, int cluster)
      : p_(p), units_(p.schedule, cluster) {}

  __device__ __forceinline__ bool Next(WorkUnit* work) {
    while (units_.Next(work)) {
      if (!IsEmpty<Config>(p_, *work)) return true;
    }
    return false;
  }

 private:
  const PersistentParams& p_;
  WorkUnits units_;
};

// The sums of one thread of a consumer: for each eight tokens its fragment of an m16n8 product.
template <class Config>
using Sums = typename Config::Sum[Config::kSums];

// Sums travel as the bits of floats.
__device__ __forceinline__ float ToFloatBits(float sum) { return sum; }
__device__ __forceinline__ float ToFloatBits(uint32_t sum) { return __uint_as_float(sum); }
template <class Sum>
__device__ __forceinline__ Sum FromFloatBits(float bits) {
  if constexpr (std::is_same_v<Sum, uint32_t>) {
    return __float_as_uint(bits);
  } else {
    return bits;
  }
}

// Scales of the two rows that a thread holds sums of.
struct RowScales {
  float low, high;
};

template <class Config>
__device__ __forceinline__ void Clear(Sums<Config>& sums) {
#pragma unroll
  for (int i = 0; i < Config::kSums; ++i) sums[i] = 0;
}

}  // namespace
}  // namespace awqd::cuda
