// Partials of stream-K tiles on their way from one cluster to another, through global memory and
// without atomics: one cluster stores and signals them, the other waits and loads. Device code
// only.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90a/persistent.cuh"

namespace awqd::cuda {
namespace {

// The index of partials in global memory: slot `slot` of the consumer of `record` in `cluster`.
// Their counter has the same index.
template <class Config>
__device__ __forceinline__ int PartialsIndex(const PersistentParams& p, int cluster, int slot,
                                             int record) {
  const int rank = blockIdx.x % Config::kCluster;
  return ((cluster * p.slots + slot) * Config::kCluster + rank) * Config::kRecords + record;
}

// This thread's first float4 of partials; the next ones lie kWarpgroupThreads apart.
template <class Config>
__device__ __forceinline__ float4* PartialsAddress(const PersistentParams& p, int set) {
  return reinterpret_cast<float4*>(p.sums) +
         int64_t{set} * (Config::kSums / 4 * kWarpgroupThreads) + threadIdx.x % kWarpgroupThreads;
}

template <class Config>
__device__ __forceinline__ void WritePartials(float4* to, const Sums<Config>& sums) {
#pragma unroll
  for (int i = 0; i < Config::kSums; i += 4) {
    __stcg(to + i / 4 * kWarpgroupThreads,
           make_float4(ToFloatBits(sums[i]), ToFloatBits(sums[i + 1]), ToFloatBits(sums[i + 2]),
                       ToFloatBits(sums[i + 3])));
  }
}

// Signals partials that the whole warpgroup has written.
__device__ __forceinline__ void SignalPartials(const PersistentParams& p, int set, int record) {
  NamedBarrier<kWarpgroupThreads>(1 + record);
  // After the barrier this release covers the stores of the whole warpgroup.
  if (threadIdx.x % kWarpgroupThreads == 0) StoreRelease(p.counters + set, 1);
}

// A consumer and the warp that signals for it meet at a named barrier.
constexpr int kSignalThreads = kWarpgroupThreads + 32;
constexpr int kSignalBarrier = 8;  // that of the first record

template <class Config>
__device__ __forceinline__ void StorePartials(const PersistentParams& p, int cluster, int slot,
                                              int record, const Sums<Config>& sums) {
  const int set = PartialsIndex<Config>(p, cluster, slot, record);
  WritePartials<Config>(PartialsAddress<Config>(p, set), sums);
  if constexpr (Config::kSignals) {
    NamedBarrierArrive<kSignalThreads>(kSignalBarrier + record);
  } else {
    SignalPartials(p, set, record);
  }
}

// The signalling warp. A release waits until all stores before it have arrived in L2, about a
// microsecond; this warp waits instead of the consumers.
template <class Config>
__device__ __forceinline__ void SignalStoredPartials(const PersistentParams& p, int cluster) {
  FilledWorkUnits<Config> units(p, cluster);
  for (WorkUnit work; units.Next(&work);) {
    if (work.end == p.schedule.k_blocks) continue;
    for (int record = 0; record < Config::kRecords; ++record) {
      NamedBarrier<kSignalThreads>(kSignalBarrier + record);
      const int set = PartialsIndex<Config>(p, cluster, 0, record);
      if (threadIdx.x % 32 == 0) StoreRelease(p.counters + set, 1);
      __syncwarp();
    }
  }
}

// Waits for partials, then sets their counter to zero for the next kernel of the stream. Each load
// of a counter takes 0.7 us, so a thread should wait for one counter only.
__device__ __forceinline__ void AwaitPartials(const PersistentParams& p, int set) {
  while (LoadAcquire(p.counters + set) == 0) {
  }
  p.counters[set] = 0;
}

// How many of `sums` floats to load at a time: at most 64, a multiple of four, in loads of equal
// size but for the last.
constexpr int BatchOf(int sums) {
  const int batches = (sums + 63) / 64;
  return (sums / 4 + batches - 1) / batches * 4;
}

// sums = partials, or with `kAdd` sums += partials. `from`: this thread's first float4 of them.
template <class Config, bool kAdd>
__device__ __forceinline__ void ReadPartials(const float4* from, Sums<Config>& sums) {
  // Floats in flight at a time.
  constexpr int kBatch = BatchOf(Config::kSums);
#pragma unroll
  for (int begin = 0; begin < Config::kSums; begin += kBatch) {
    float4 split[kBatch / 4];
#pragma unroll
    for (int i = 0; i < kBatch / 4 && begin + i * 4 < Config::kSums; ++i) {
      split[i] = __ldcg(from + (begin / 4 + i) * kWarpgroupThreads);
    }
#pragma unroll
    for (int i = 0; i < kBatch / 4 && begin + i * 4 < Config::kSums; ++i) {
      using Sum = typename Config::Sum;
      Sum* to = sums + begin + i * 4;
      const float v[4] = {split[i].x, split[i].y, split[i].z, split[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Sum sum = FromFloatBits<Sum>(v[j]);
        to[j] = kAdd ? to[j] + sum : sum;
      }
    }
  }
}

template <class Config, bool kAdd>
__device__ __forceinline__ void LoadPartials(const PersistentParams& p, int set,
                                             Sums<Config>& sums) {
  ReadPartials<Config, kAdd>(PartialsAddress<Config>(p, set), sums);
}

// The fix-up: sums += the partials of the clusters first .. last - 1, in this order.
template <class Config>
__device__ __forceinline__ void AddPartials(const PersistentParams& p, int record, int first,
                                            int last, Sums<Config>& sums) {
  for (int from = first + threadIdx.x % kWarpgroupThreads; from < last; from += kWarpgroupThreads) {
    AwaitPartials(p, PartialsIndex<Config>(p, from, 0, record));
  }
  NamedBarrier<kWarpgroupThreads>(1 + record);
  for (int cluster = first; cluster < last; ++cluster) {
    LoadPartials<Config, true>(p, PartialsIndex<Config>(p, cluster, 0, record), sums);
  }
}

}  // namespace
}  // namespace awqd::cuda
