// The kernel of the persistent product y = x W (+ bias), 16-bit activations, 4-bit weights, sm_90a.
//
// Layout: mma16. Weights are wgmma's A operand, decoded from shared memory into registers, once per
// block whatever the number of tokens; tokens are its B operand, read by the tensor cores from
// shared memory. One block per multiprocessor: two producer threads keep a ring full with bulk
// copies (records as they lie in memory, tokens by the tensor copy engine, shared by the blocks of
// a cluster through multicast), two or four consumer groups of four warps own 64 out features each.
// A consumer decodes one operand while the tensor cores work on the one before. schedule.h says who
// computes what; sums of cut tiles meet in global memory in the order of K, without atomics.
// Limits: none on shapes: the layout pads N and K, the copy engine reads zeros past m and k.
#pragma once

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/attributes.h"
#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm90a/bulk.cuh"
#include "kernels/cuda/sm90a/qmatmul_a16w4.h"
#include "kernels/cuda/sm90a/wgmma.cuh"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

constexpr int kGroupThreads = 128;

template <int kTokens_, int kGroups_, int kCluster_, bool kFineGroups_>
struct PersistentConfig {
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = kGroups_;  // of consumers
  static constexpr int kCluster = kCluster_;
  // Groups of K shorter than 64: the scales change within a lane's 16 bytes.
  static constexpr bool kFineGroups = kFineGroups_;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  // Consumers hold the sums. A block trades within the registers that it was started with.
  static constexpr int kStartRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kConsumerRegisters = kGroups == 2 ? 232 : 104;
  static constexpr int kProducerRegisters = kGroups == 2 ? 40 : 64;
  static_assert(kGroups * kConsumerRegisters + kProducerRegisters <=
                (kGroups + 1) * kStartRegisters);
  static constexpr int kStageBytes = PersistentStageBytes(kTokens, kGroups, kFineGroups);
  static constexpr int kStages = PersistentStages(kTokens, kGroups, kFineGroups);
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

template <class Config>
__device__ __forceinline__ int ColumnTiles(const PersistentParams& p) {
  constexpr int kPerCluster = Config::kCluster * Config::kGroups;
  return (p.tiles_n + kPerCluster - 1) / kPerCluster;
}

// ---- producers ---------------------------------------------------------------------------------

// One thread brings the weights, which depend on no earlier kernel; another the tokens. Addresses
// move on by addition: there is no time for more.
template <class Config>
__device__ __forceinline__ void ProduceWeights(const PersistentParams& p, const Ring<Config>& ring,
                                               int cluster, int rank) {
  const int64_t row_bytes = int64_t{p.schedule.k_blocks} * ring.record_bytes;
  Cursor<Config> at;
  Pieces pieces(p.schedule, cluster);
  for (Piece piece; pieces.Next(&piece);) {
    const TilePlace place = PlaceOf(piece.tile, p.token_tiles, ColumnTiles<Config>(p));
    const int first = (place.columns * Config::kCluster + rank) * Config::kGroups;
    const uint8_t* record[Config::kGroups];
#pragma unroll
    for (int g = 0; g < Config::kGroups; ++g) {
      // A row tile past the end repeats the last one; its results are never stored.
      record[g] = p.records + min(first + g, p.tiles_n - 1) * row_bytes +
                  int64_t{piece.begin} * ring.record_bytes;
    }
    for (int step = piece.begin; step < piece.end; ++step, at.Advance()) {
      BarrierWait(ring.Empty(at.slot), at.parity ^ 1);
      BarrierExpect(ring.Full(at.slot), Config::kGroups * ring.record_bytes);
#pragma unroll
      for (int g = 0; g < Config::kGroups; ++g) {
        BulkCopy(ring.Record(at.slot, g), record[g], ring.record_bytes, ring.Full(at.slot));
        record[g] += ring.record_bytes;
      }
    }
  }
}

// This block's share of the tokens, for the whole cluster.
template <class Config>
__device__ __forceinline__ void ProduceTokens(const PersistentParams& p, const Ring<Config>& ring,
                                              int cluster, int rank) {
  constexpr int kShare = Config::kTokens / Config::kCluster;
  WaitForEarlierKernels();
  Cursor<Config> at;
  Pieces pieces(p.schedule, cluster);
  for (Piece piece; pieces.Next(&piece);) {
    const TilePlace place = PlaceOf(piece.tile, p.token_tiles, ColumnTiles<Config>(p));
    const int token = place.tokens * Config::kTokens + rank * kShare;
    for (int step = piece.begin; step < piece.end; ++step, at.Advance()) {
      BarrierWait(ring.Empty(at.slot), at.parity ^ 1);
      BarrierExpect(ring.Full(at.slot), Config::kTokenBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t to =
            ring.Tokens(at.slot) + half * Config::kTokens * 128 + rank * kShare * 128;
        const int k = step * mma16::kBlockK + half * 64;
        if (Config::kCluster == 1) {
          TensorCopy(to, &p.x, k, token, ring.Full(at.slot));
        } else {
          TensorCopyMulticast(to, &p.x, k, token, ring.Full(at.slot), (1 << Config::kCluster) - 1);
        }
      }
    }
  }
}

// ---- consumers ---------------------------------------------------------------------------------

template <class Config>
using Sums = float[Config::kSums];

// Four fragments of 16 rows x 16 k, as one lane holds them.
using Operand = uint32_t[4][4];

// What an operand is decoded from: half a record, 64 of K.
template <class Config>
struct Packed {
  uint4 codes;
  LaneMetaBits metas[Config::kFineGroups ? 4 : 1];
};

template <class Config>
__device__ __forceinline__ Packed<Config> ReadHalf(uint32_t record, int half, int metas) {
  const int lane = threadIdx.x % 32, row_tile = threadIdx.x / 32 % 4;
  Packed<Config> out;
  out.codes = LoadShared16(record + (row_tile * 2 + half) * mma16::kUnitBytes + lane * 16);
#pragma unroll
  for (int s = 0; s < (Config::kFineGroups ? 4 : 1); ++s) {
    const int which = Config::kFineGroups ? (half * 4 + s) * metas / 8 : (metas - 1) * half;
    out.metas[s] =
        ReadMeta(record + mma16::kCodesBytes + which * mma16::kMetaBytes, row_tile, lane);
  }
  return out;
}

template <class Math, class Config>
__device__ __forceinline__ void Decode(const Packed<Config>& packed, Operand& out) {
  const uint32_t words[4] = {packed.codes.x, packed.codes.y, packed.codes.z, packed.codes.w};
  typename Math::Meta meta;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (s == 0 || Config::kFineGroups) {
      meta = Math::Expand(packed.metas[Config::kFineGroups ? s : 0]);
    }
    const Pairs pairs = Math::Decode(words[s], meta);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[s][i] = pairs.v[i];
  }
}

template <class Math, class Config>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const PersistentParams& p, const Ring<Config>& ring,
                                      int group)
      : p_(p), ring_(ring), group_(group) {}

  // sums = W^T x over the steps of `piece`. While the tensor cores work on one half of a step, the
  // next is decoded, and the one after that is waited for and read.
  __device__ __forceinline__ void Accumulate(const Piece& piece, Sums<Config>& sums) {
    int add = 0;
    BarrierWait(ring_.Full(at_.slot), at_.parity);
    Packed<Config> packed = ReadHalf<Config>(ring_.Record(at_.slot, group_), 0, p_.metas);
    for (int step = piece.begin; step < piece.end; ++step) {
      const int slot = at_.slot;
      Decode<Math, Config>(packed, operands_[0]);
      Multiply(slot, 0, add, sums);
      packed = ReadHalf<Config>(ring_.Record(slot, group_), 1, p_.metas);
      WgmmaWait<1>();
      // All that read the step before is done.
      if (step > piece.begin) Release(before_);
      Decode<Math, Config>(packed, operands_[1]);
      Multiply(slot, 1, 1, sums);
      at_.Advance();
      if (step + 1 < piece.end) {
        BarrierWait(ring_.Full(at_.slot), at_.parity);
        packed = ReadHalf<Config>(ring_.Record(at_.slot, group_), 0, p_.metas);
      }
      WgmmaWait<1>();
      add = 1;
      before_ = slot;
    }
    WgmmaWait<0>();
    Release(before_);
  }

 private:
  __device__ __forceinline__ void Multiply(int slot, int half, int add, Sums<Config>& sums) {
    const uint64_t tokens = TokensDescriptor(ring_.Tokens(slot) + half * Config::kTokens * 128);
    WgmmaArrive();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      Wgmma<Config::kTokens, Math::kBf16>(sums, operands_[half][s], tokens + s * kDescriptorStep,
                                          s == 0 ? add : 1);
    }
    WgmmaCommit();
  }

  // Every warp says for itself that it has read a slot, to each block that writes into it.
  __device__ __forceinline__ void Release(int slot) const {
    __syncwarp();
    if (threadIdx.x % 32 < Config::kCluster) BarrierArrive(ring_.Empty(slot), threadIdx.x % 32);
  }

  const PersistentParams& p_;
  const Ring<Config>& ring_;
  const int group_;
  Cursor<Config> at_;
  int before_ = 0;
  Operand operands_[2];
};

// ---- sums of cut tiles -------------------------------------------------------------------------

template <class Config>
inline constexpr int kSlotStride = Config::kGroups* kGroupThreads;  // float4s

// This thread's first float4 in the slot of `block` (a block's number in the grid); the next follow
// kSlotStride apart.
template <class Config>
__device__ __forceinline__ float4* SlotOf(const PersistentParams& p, int block) {
  constexpr int kQuads = Config::kSums / 4 * kSlotStride<Config>;
  return reinterpret_cast<float4*>(p.sums) + static_cast<int64_t>(block) * kQuads + threadIdx.x;
}

template <class Config>
__device__ __forceinline__ uint32_t* CounterOf(const PersistentParams& p, int block, int group) {
  return p.counters + block * Config::kGroups + group;
}

template <class Config>
__device__ __forceinline__ void HandOver(const PersistentParams& p, int group,
                                         const Sums<Config>& sums) {
  float4* slot = SlotOf<Config>(p, blockIdx.x);
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4) {
    __stcg(slot + i / 4 * kSlotStride<Config>,
           make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
  }
  NamedBarrier<kGroupThreads>(1 + group);
  // Through the barrier this covers what the whole group wrote.
  if (threadIdx.x % kGroupThreads == 0) {
    StoreRelease(CounterOf<Config>(p, blockIdx.x, group), 1);
  }
}

// Waits until the clusters first .. last - 1 have handed over, all at once.
template <class Config>
__device__ __forceinline__ void AwaitSums(const PersistentParams& p, int group, int first,
                                          int last) {
  const int rank = blockIdx.x % Config::kCluster;
  for (int cluster = first + threadIdx.x % kGroupThreads; cluster < last;
       cluster += kGroupThreads) {
    uint32_t* counter = CounterOf<Config>(p, cluster * Config::kCluster + rank, group);
    while (LoadAcquire(counter) == 0) {
    }
    // Nobody reads it before the next kernel of the stream.
    *counter = 0;
  }
  NamedBarrier<kGroupThreads>(1 + group);
}

// Adds the sums of the clusters first .. last - 1, in this order.
template <class Config>
__device__ __forceinline__ void TakeOver(const PersistentParams& p, int group, int first, int last,
                                         Sums<Config>& sums) {
  // Loads in flight at a time: of one cluster, or of several where each has few.
  constexpr int kInFlight = Config::kGroups == 2 ? 64 : 32;  // floats
  constexpr int kBatch = Config::kSums < kInFlight ? Config::kSums : kInFlight;
  constexpr int kDeep = kInFlight / kBatch;
  constexpr int64_t kNext = int64_t{Config::kSums / 4} * kSlotStride<Config> * Config::kCluster;
  AwaitSums<Config>(p, group, first, last);
  const float4* slot = SlotOf<Config>(p, first * Config::kCluster + blockIdx.x % Config::kCluster);
  for (int cluster = first; cluster < last; cluster += kDeep, slot += kDeep * kNext) {
#pragma unroll
    for (int begin = 0; begin < Config::kSums; begin += kBatch) {
      float4 part[kDeep][kBatch / 4];
#pragma unroll
      for (int c = 0; c < kDeep; ++c) {
#pragma unroll
        for (int i = 0; i < kBatch / 4; ++i) {
          if (cluster + c >= last) continue;
          part[c][i] = __ldcg(slot + c * kNext + (begin / 4 + i) * kSlotStride<Config>);
        }
      }
#pragma unroll
      for (int c = 0; c < kDeep; ++c) {
        if (cluster + c >= last) break;
#pragma unroll
        for (int i = 0; i < kBatch / 4; ++i) {
          float* to = sums + begin + i * 4;
          to[0] += part[c][i].x, to[1] += part[c][i].y;
          to[2] += part[c][i].z, to[3] += part[c][i].w;
        }
      }
    }
  }
}

// ---- output ------------------------------------------------------------------------------------

// A warp's share of a tile in the output: 16 features x kTokens tokens.
struct Corner {
  int64_t row;    // first feature
  int64_t token;  // first token
};

template <class Config>
__device__ __forceinline__ void ScaleTokens(const PersistentParams& p, const Corner& at,
                                            Sums<Config>& sums) {
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4) {
    const int64_t token = at.token + i / 4 * 8 + threadIdx.x % 4 * 2;
    const float s0 = token < p.m ? p.x_scale[token] : 0;
    const float s1 = token + 1 < p.m ? p.x_scale[token + 1] : 0;
    sums[i] *= s0, sums[i + 1] *= s1, sums[i + 2] *= s0, sums[i + 3] *= s1;
  }
}

template <class Config>
__device__ __forceinline__ void AddBias(const PersistentParams& p, const Corner& at,
                                        Sums<Config>& sums) {
  const int64_t row = at.row + threadIdx.x % 32 / 4;
  const float b0 = row < p.n ? p.bias[row] : 0;
  const float b1 = row + 8 < p.n ? p.bias[row + 8] : 0;
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4) {
    sums[i] += b0, sums[i + 1] += b0, sums[i + 2] += b1, sums[i + 3] += b1;
  }
}

// Lanes of eight rows write 32 bytes together as they are.
template <class Config>
__device__ __forceinline__ void StoreFp32(const PersistentParams& p, const Corner& at,
                                          const Sums<Config>& sums) {
  const int64_t row = at.row + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < Config::kSums; ++i) {
    const int64_t token = at.token + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const int64_t n = row + i % 4 / 2 * 8;
    if (token < p.m && n < p.n) static_cast<float*>(p.y)[token * p.n + n] = sums[i];
  }
}

// Two row tiles of eight features meet as 16-bit pairs: afterwards each lane has four consecutive
// features of one token. Even lanes serve the first row tile, odd ones the second.
template <bool kHalf>
__device__ __forceinline__ uint2 FourFeatures(const float* d) {
  const uint32_t upper = TransposeMatrix(kHalf ? ToFp16x2(d[0], d[1]) : ToBf16x2(d[0], d[1]));
  const uint32_t lower = TransposeMatrix(kHalf ? ToFp16x2(d[2], d[3]) : ToBf16x2(d[2], d[3]));
  const bool odd = threadIdx.x % 2 == 1;
  const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? upper : lower, 1);
  return odd ? uint2{other, lower} : uint2{upper, other};
}

// The first `count` of four elements, at most.
__device__ __forceinline__ void StoreSome(uint16_t* y, uint2 v, int count, bool wide) {
  if (wide && count >= 4) {
    *reinterpret_cast<uint2*>(y) = v;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < count) y[e] = (e < 2 ? v.x : v.y) >> e % 2 * 16 & 0xffff;
  }
}

// `kWhole`: the tile lies within the output and four elements may be stored at once. Eight tokens
// at a time, 32 bytes of each.
template <class Config, bool kHalf, bool kWhole>
__device__ __forceinline__ void Store16(const PersistentParams& p, const Corner& at,
                                        const Sums<Config>& sums) {
  const int lane = threadIdx.x % 32;
  const int64_t row = at.row + lane % 2 * 8 + lane % 4 / 2 * 4;
  int64_t token = at.token + lane / 4;
  uint16_t* y = static_cast<uint16_t*>(p.y) + token * p.n + row;
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4, token += 8, y += 8 * p.n) {
    const uint2 v = FourFeatures<kHalf>(sums + i);
    if constexpr (kWhole) {
      *reinterpret_cast<uint2*>(y) = v;
    } else if (token < p.m) {
      StoreSome(y, v, static_cast<int>(p.n - row), p.y_wide);
    }
  }
}

template <class Config>
__device__ __forceinline__ void Store(const PersistentParams& p, const Corner& at,
                                      Sums<Config>& sums) {
  if (p.x_scale != nullptr) ScaleTokens<Config>(p, at, sums);
  if (p.bias != nullptr) AddBias<Config>(p, at, sums);
  const bool whole =
      p.y_wide && at.token + Config::kTokens <= p.m && at.row + mma16::kRowTile <= p.n;
  if (p.y_dtype == DType::kFp32) {
    StoreFp32<Config>(p, at, sums);
  } else if (p.y_dtype == DType::kFp16) {
    whole ? Store16<Config, true, true>(p, at, sums) : Store16<Config, true, false>(p, at, sums);
  } else {
    whole ? Store16<Config, false, true>(p, at, sums) : Store16<Config, false, false>(p, at, sums);
  }
}

template <class Math, class Config>
__device__ __forceinline__ void Consume(const PersistentParams& p, const Ring<Config>& ring,
                                        int cluster) {
  const int group = threadIdx.x / kGroupThreads;
  const int rank = blockIdx.x % Config::kCluster;
  Consumer<Math, Config> consumer(p, ring, group);
  Pieces pieces(p.schedule, cluster);
  Piece piece;
  while (pieces.Next(&piece)) {
    Sums<Config> sums;
    consumer.Accumulate(piece, sums);
    if (piece.end < p.schedule.k_blocks) {
      HandOver<Config>(p, group, sums);
      continue;
    }
    if (piece.begin > 0) {
      const int first = RunOf(p.schedule, piece.tile * p.schedule.k_blocks);
      TakeOver<Config>(p, group, first, cluster, sums);
    }
    const TilePlace place = PlaceOf(piece.tile, p.token_tiles, ColumnTiles<Config>(p));
    const int64_t record = (place.columns * Config::kCluster + rank) * Config::kGroups + group;
    const int64_t row = record * mma16::kTileN + threadIdx.x / 32 % 4 * int64_t{mma16::kRowTile};
    Store<Config>(p, {row, int64_t{place.tokens} * Config::kTokens}, sums);
  }
}

template <class Math, class Config>
__global__ __launch_bounds__(Config::kThreads,
                             1) void PersistentA16W4(const __grid_constant__ PersistentParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  LaunchDependents();
  const Ring<Config> ring{SharedAddress(shared), mma16::kCodesBytes + p.metas * mma16::kMetaBytes};
  if (threadIdx.x == 0) {
    PrefetchMap(&p.x);
    for (int slot = 0; slot < Config::kStages; ++slot) {
      BarrierInit(ring.Full(slot), 2);
      BarrierInit(ring.Empty(slot), Config::kCluster * Config::kGroups * 4);
    }
    BarrierInitFence();
  }
  if (Config::kCluster > 1) {
    ClusterBarrier();
  } else {
    __syncthreads();
  }
  const int cluster = blockIdx.x / Config::kCluster;
  if (threadIdx.x / kGroupThreads == Config::kGroups) {
    ShrinkRegisters<Config::kProducerRegisters>();
    const int rank = blockIdx.x % Config::kCluster;
    if (threadIdx.x == Config::kGroups * kGroupThreads) {
      ProduceWeights<Config>(p, ring, cluster, rank);
    } else if (threadIdx.x == Config::kGroups * kGroupThreads + 32) {
      ProduceTokens<Config>(p, ring, cluster, rank);
    }
  } else {
    GrowRegisters<Config::kConsumerRegisters>();
    WaitForEarlierKernels();
    Consume<Math, Config>(p, ring, cluster);
  }
  // No block may leave while another still writes into it or arrives at it.
  if (Config::kCluster > 1) ClusterBarrier();
}

template <class Math, class Config>
absl::Status LaunchConfigured(const PersistentParams& p, const DeviceInfo& device,
                              StreamView stream) {
  const Attributes attributes = OverlappedLaunch(device, Config::kCluster);
  const LaunchConfig config{
      .grid = static_cast<unsigned>(p.schedule.clusters * Config::kCluster),
      .block = Config::kThreads,
      .shared_bytes = PersistentSharedBytes(Config::kTokens, Config::kGroups, Config::kFineGroups),
      .stream = stream,
      .attributes = attributes.list,
      .attribute_count = attributes.count,
  };
  return Launch<PersistentA16W4<Math, Config>>("sm90a/qmatmul_a16w4", config, p);
}

// The compiled tiles, one line per entry of PersistentTiles().
template <class Math>
absl::Status LaunchTile(const PersistentParams& p, const PersistentTile& tile,
                        const DeviceInfo& device, StreamView stream) {
  const bool fine = p.metas > 2;
#define AWQD_TILE(...)                                                                             \
  if (PersistentTile{__VA_ARGS__} == tile) {                                                       \
    return fine ? LaunchConfigured<Math, PersistentConfig<__VA_ARGS__, true>>(p, device, stream)   \
                : LaunchConfigured<Math, PersistentConfig<__VA_ARGS__, false>>(p, device, stream); \
  }
  AWQD_TILE(64, 2, 1)
  AWQD_TILE(64, 4, 1)
  AWQD_TILE(128, 2, 1)
  AWQD_TILE(256, 2, 1)
  AWQD_TILE(256, 2, 2)
#undef AWQD_TILE
  return absl::InternalError(absl::StrCat("sm90a/qmatmul_a16w4: no tile of ", tile.tokens,
                                          " tokens x ", tile.groups, " groups x ", tile.cluster,
                                          " blocks was compiled"));
}

}  // namespace
}  // namespace awqd::cuda
