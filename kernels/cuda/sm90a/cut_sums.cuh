// Sums of cut tiles: how one cluster hands them over and the tile's owner adds them, through global
// memory, in the order of K. Device code only.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90a/persistent.cuh"

namespace awqd::cuda {
namespace {

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
  constexpr int kInFlight = Config::kBlocks == 2 ? 16 : 64;  // floats
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

}  // namespace
}  // namespace awqd::cuda
