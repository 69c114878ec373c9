// Tiles cut along K into parts that the blocks of a cluster take: each block stores a share of the
// tokens and gets the others' sums of it through distributed shared memory. Device code only.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90a/persistent.cuh"

namespace awqd::cuda {
namespace {

// What a block of the cluster stores in the end.
template <class Config>
struct Share {
  static constexpr int kTokens = Config::kTokens / Config::kParts;
  static constexpr int kSums = Config::kSums / Config::kParts;
  // That the others send.
  static constexpr int kBytes =
      (Config::kParts - 1) * Config::kGroups * kGroupThreads * kSums * int{sizeof(float)};
  static_assert(kTokens % 8 == 0 && kBytes <= Config::kStages * Config::kStageBytes);
};

// Where this thread's counterpart in another block leaves what it sends; `from` counts the others.
template <class Config>
__device__ __forceinline__ uint32_t SentAddress(const Ring<Config>& ring, int from, int group) {
  const int set = from * Config::kGroups + group;
  return ring.base +
         (set * (Share<Config>::kSums / 4) * kGroupThreads + threadIdx.x % kGroupThreads) * 16;
}

// own = the sums of this block's tokens over all parts: its own first, then the others' in the
// order of K. The ring of a block becomes the place for them once all its groups are through.
template <class Config>
__device__ __forceinline__ void Exchange(const Ring<Config>& ring, int rank, int group,
                                         const Sums<Config>& sums, Sums<Share<Config>>& own) {
  constexpr int kSums = Share<Config>::kSums, kStep = kGroupThreads * 16;
  ClusterWait();
  NamedBarrier<kGroupThreads>(1 + group);
  const int peer = threadIdx.x % kGroupThreads;
  if (peer < Config::kParts && peer != rank) BarrierArrive(ring.Through(), peer);
  BarrierWait(ring.Through(), 0);
#pragma unroll
  for (int part = 0; part < Config::kParts; ++part) {
    if (part == rank) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) own[i] = sums[part * kSums + i];
    } else {
      const uint32_t to = AddressInBlock(SentAddress(ring, rank - (rank > part), group), part);
      const uint32_t arrived = AddressInBlock(ring.Arrived(), part);
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        PushFloat4(to + i / 4 * kStep, sums + part * kSums + i, arrived);
      }
    }
  }
  BarrierWait(ring.Arrived(), 0);
#pragma unroll
  for (int from = 0; from < Config::kParts - 1; ++from) {
    const uint32_t at = SentAddress(ring, from, group);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const uint4 part = LoadShared16(at + i / 4 * kStep);
      own[i] += __uint_as_float(part.x), own[i + 1] += __uint_as_float(part.y);
      own[i + 2] += __uint_as_float(part.z), own[i + 3] += __uint_as_float(part.w);
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
