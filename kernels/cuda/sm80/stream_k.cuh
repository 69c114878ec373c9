// The stream-K product of few tokens, for tiles that do not divide evenly among the
// multiprocessors: one block for each, all with equally many records. For sm_90 and later.
//
// common/stream_k_schedule.h gives the work units of a block. The k-range of a work unit is divided
// among the block's consumers, so that these have equally many records too. A consumer stores its
// sums in a buffer of shared memory and goes on with the next work unit. Four more warps, the
// fix-up warps, add the buffers up and store y, or partials for the block that fixes up the tile.
// They wait for partials of earlier blocks while consumers still multiply. So a consumer never
// waits for a sum, only for a free buffer.
//
// The order of a sum depends on the weight, the device and whether there are more than 8 tokens,
// never on timing.
#pragma once

#include "kernels/cuda/common/stream_k_schedule.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/consumer.cuh"
#include "kernels/cuda/sm80/reduction.cuh"

namespace awqd::cuda {
namespace {

// Named barriers; consumers have 1 and the following.
constexpr int kFilledBarrier = 8;  // that of the first buffer
constexpr int kFixUpBarrier = kFilledBarrier + kStreamKBuffers;

template <class Config>
struct StreamKConfig {
  static_assert(Config::kRowTiles == 1 && Config::kConsumers < kFilledBarrier);
  static constexpr int kThreads = Config::kThreads + kConsumerThreads;
  static constexpr int kPlaceBytes = Config::kConsumers * Config::kReductionBytes;
  // Sums of a tile for each thread of the fix-up warps, in fours.
  static constexpr int kFours = Config::kTokens * mma16::kTileN / 4 / kConsumerThreads;
  static_assert(kFours * kConsumerThreads * 4 == Config::kTokens * mma16::kTileN);
};

// Addresses in shared memory: the rings, the buffers, a barrier for each that says it was read.
template <class Config>
struct Places {
  uint32_t first;

  __device__ __forceinline__ Reduction At(int place) const {
    return {first + place * StreamKConfig<Config>::kPlaceBytes, Config::kReductionBytes,
            Config::kRowsShift, 1, 0};
  }
  __device__ __forceinline__ uint32_t Read(int place) const {
    return first + kStreamKBuffers * StreamKConfig<Config>::kPlaceBytes + place * 8;
  }
};

// The k-ranges of one consumer: of each work unit of its block a share, equal but for one step; all
// shares together are equal too.
template <class Config>
class Shares {
 public:
  __device__ __forceinline__ Shares(const StreamKSchedule& schedule, int consumer)
      : units_(schedule, blockIdx.x), consumer_(consumer) {}

  // The share of the next work unit, which may be empty. False after the last work unit.
  __device__ __forceinline__ bool Next(WorkUnit* share) {
    if (!units_.Next(share)) return false;
    constexpr int kConsumers = Config::kConsumers;
    const int steps = share->end - share->begin;
    // Numbered through all work units, step i belongs to consumer i % kConsumers.
    const int each = steps / kConsumers, more = steps % kConsumers;
    const int mine = (consumer_ + kConsumers - first_) % kConsumers;
    first_ = (first_ + more) % kConsumers;
    share->begin += mine * each + min(mine, more);
    share->end = share->begin + each + (mine < more ? 1 : 0);
    return true;
  }

 private:
  WorkUnits units_;
  const int consumer_;
  int first_ = 0;  // the consumer that has the first step of the next work unit
};

// Loads the steps of a consumer's shares, one after the other.
template <class Config>
class ShareLoader {
 public:
  __device__ __forceinline__ ShareLoader(const QMatmulParams& p, const Slot<Config>& slot,
                                         uint32_t ring, int consumer)
      : shares_(p.schedule, consumer),
        k_blocks_(p.k_blocks),
        more_(Go()),
        loader_(p, slot, ring, share_.tile, 0, share_.begin) {}

  __device__ __forceinline__ void Prefetch() const {
    if (more_) loader_.Prefetch(min(2, share_.end - share_.begin));
  }

  __device__ __forceinline__ void Load() {
    if (more_) {
      loader_.Load();
      if (++share_.begin == share_.end) {
        const WorkUnit from = share_;
        more_ = Go();
        const int blocks = share_.begin - from.begin;
        loader_.Move((share_.tile - from.tile) * k_blocks_ + blocks, blocks);
      }
    }
    CommitGroup();
  }

 private:
  // To the next share that has steps.
  __device__ __forceinline__ bool Go() {
    while (shares_.Next(&share_)) {
      if (share_.begin < share_.end) return true;
    }
    return false;
  }

  Shares<Config> shares_;
  const int k_blocks_;
  WorkUnit share_;  // what is left of it
  bool more_;
  TileLoader<Config> loader_;
};

template <class Math, class Config>
__device__ __forceinline__ void Consume(const QMatmulParams& p, uint32_t rings,
                                        const Places<Config>& places, int index) {
  const Slot<Config> slot(p.metas);
  const uint32_t ring = rings + index * slot.ring_bytes();
  ShareLoader<Config> loader(p, slot, ring, index);
  loader.Prefetch();
  WaitForEarlierKernels();
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) loader.Load();

  Consumer<Math, Config> consumer(p, slot, ring);
  Shares<Config> shares(p.schedule, index);
  WorkUnit share;
  for (int count = 0; shares.Next(&share); ++count) {
    Sums<Config> sums = {};
    for (int left = share.end - share.begin; left > 0; --left) {
      WaitGroup<Config::kStages - 2>();
      NamedBarrier<kConsumerThreads>(1 + index);
      loader.Load();
      consumer.Accumulate(sums);
    }
    const int place = count % kStreamKBuffers;
    if (count >= kStreamKBuffers)
      BarrierWait(places.Read(place), (count / kStreamKBuffers - 1) % 2);
    StoreSums<Config>(places.At(place), index, sums);
    NamedBarrierArrive<StreamKConfig<Config>::kThreads>(kFilledBarrier + place);
  }
}

// Where the partials of a block are stored. Every block has room for those of one work unit, and a
// counter that says they are there.
template <class Config>
__device__ __forceinline__ float4* SetOf(const QMatmulParams& p, int block) {
  return reinterpret_cast<float4*>(p.sums) +
         block * (StreamKConfig<Config>::kFours * kConsumerThreads) + ConsumerThread();
}

template <class Config>
using FourSums = Four<float>[StreamKConfig<Config>::kFours];

// Adds the partials of the blocks before this one of the tile that begins at stream-K step `step`.
template <class Config>
__device__ __forceinline__ void AddPartials(const QMatmulParams& p, int step,
                                            FourSums<Config>& sums) {
  const int block = static_cast<int>(blockIdx.x), first = ClusterOfStep(p.schedule, step);
  for (int from = first + ConsumerThread(); from < block; from += kConsumerThreads) {
    while (LoadAcquire(p.counters + from) == 0) {
    }
    p.counters[from] = 0;
  }
  NamedBarrier<kConsumerThreads>(kFixUpBarrier);
  for (int from = first; from < block; ++from) {
#pragma unroll
    for (int i = 0; i < StreamKConfig<Config>::kFours; ++i) {
      const float4 v = __ldcg(SetOf<Config>(p, from) + i * kConsumerThreads);
      sums[i].x += v.x, sums[i].y += v.y, sums[i].z += v.z, sums[i].w += v.w;
    }
  }
}

template <class Config>
__device__ __forceinline__ void StorePartials(const QMatmulParams& p,
                                              const FourSums<Config>& sums) {
#pragma unroll
  for (int i = 0; i < StreamKConfig<Config>::kFours; ++i) {
    __stcg(SetOf<Config>(p, blockIdx.x) + i * kConsumerThreads,
           make_float4(sums[i].x, sums[i].y, sums[i].z, sums[i].w));
  }
  NamedBarrier<kConsumerThreads>(kFixUpBarrier);
  // After the barrier this release covers the stores of all.
  if (ConsumerThread() == 0) StoreRelease(p.counters + blockIdx.x, 1);
}

template <class Config>
__device__ __forceinline__ void StoreTile(const QMatmulParams& p, int tile,
                                          const FourSums<Config>& sums) {
  constexpr int kQuads = mma16::kTileN / 4;
#pragma unroll
  for (int i = 0; i < StreamKConfig<Config>::kFours; ++i) {
    const int at = i * kConsumerThreads + ConsumerThread(), token = at / kQuads;
    const int64_t n = static_cast<int64_t>(tile) * mma16::kTileN + at % kQuads * 4;
    if (token >= p.m || n >= p.n) continue;
    EpilogueFour(p, token, n, static_cast<int>(min(p.n - n, int64_t{4})), sums[i]);
  }
}

template <class Config>
__device__ __forceinline__ void FixUp(const QMatmulParams& p, const Places<Config>& places) {
  constexpr int kQuads = mma16::kTileN / 4;
  WaitForEarlierKernels();
  WorkUnits units(p.schedule, blockIdx.x);
  WorkUnit work;
  for (int count = 0; units.Next(&work); ++count) {
    const bool whole = work.end == p.k_blocks;
    FourSums<Config> sums = {};
    if (whole && work.begin > 0) AddPartials<Config>(p, work.tile * p.k_blocks, sums);
    const int place = count % kStreamKBuffers;
    const Reduction reduction = places.At(place);
    NamedBarrier<StreamKConfig<Config>::kThreads>(kFilledBarrier + place);
#pragma unroll
    for (int i = 0; i < StreamKConfig<Config>::kFours; ++i) {
      const int at = i * kConsumerThreads + ConsumerThread();
      const int row = at % kQuads * 4, token = at / kQuads;
      const Four<float> own = AddKRanges<Config, float>(
          reduction, reduction.slots + (token * SumStride(Config::kRows) + row) * 4);
      sums[i].x += own.x, sums[i].y += own.y, sums[i].z += own.z, sums[i].w += own.w;
    }
    BarrierArrive(places.Read(place));
    whole ? StoreTile<Config>(p, work.tile, sums) : StorePartials<Config>(p, sums);
  }
}

template <class Math, class Config>
__global__ __launch_bounds__(StreamKConfig<Config>::kThreads,
                             1) void StreamKProduct(const __grid_constant__ QMatmulParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  LaunchDependents();
  const uint32_t rings = SharedAddress(shared);
  const Places<Config> places{rings + Config::kConsumers * Slot<Config>(p.metas).ring_bytes()};
  if (threadIdx.x < kStreamKBuffers) BarrierInit(places.Read(threadIdx.x), kConsumerThreads);
  __syncthreads();
  // The same for a whole warp, and known to be.
  const int index = __shfl_sync(0xffffffffu, threadIdx.x / kConsumerThreads, 0);
  if (index < Config::kConsumers) {
    Consume<Math, Config>(p, rings, places, index);
  } else {
    FixUp<Config>(p, places);
  }
#endif
}

template <class Math, class Record, MatmulVariant kTile>
absl::Status LaunchStreamK(const QMatmulParams& p, const DeviceInfo& device, StreamView stream) {
  using Config = QMatmulConfig<Record, kTile, typename Math::X, float>;
  const int record_bytes = mma16::RecordBytes(Record::kBits, p.metas, Record::kMetaKind);
  const LaunchConfig config{
      .grid = {static_cast<unsigned>(p.schedule.clusters)},
      .block = StreamKConfig<Config>::kThreads,
      .shared_bytes = StreamKSharedBytes(kTile, {record_bytes, sizeof(typename Config::X)}),
      .stream = stream,
      .attributes = OverlappedLaunch(device),
  };
  return Launch<StreamKProduct<Math, Config>>("the fused product of sm80", config, p);
}

template <class Math, class Record>
absl::Status LaunchStreamKTile(const QMatmulParams& p, const DeviceInfo& device,
                               StreamView stream) {
  return p.m <= kStreamKTiles[0].tokens
             ? LaunchStreamK<Math, Record, kStreamKTiles[0]>(p, device, stream)
             : LaunchStreamK<Math, Record, kStreamKTiles[1]>(p, device, stream);
}

}  // namespace

template <DType kX, int kBits>
absl::Status LaunchStreamKScaledSums(const QMatmulParams& p, const DeviceInfo& device,
                                     StreamView stream) {
  constexpr bool kBf16 = kX == DType::kBf16;
  using One = Record<kBits, 1>;
  using Two = Record<kBits, 2>;
  return p.metas == 1 ? LaunchStreamKTile<ScaledSumsMath<One, kBf16>, One>(p, device, stream)
                      : LaunchStreamKTile<ScaledSumsMath<Two, kBf16>, Two>(p, device, stream);
}

}  // namespace awqd::cuda
