// Tiles cut along K into parts that the blocks of a cluster take: each block stores a share of the
// tokens and gets the others' sums of it through distributed shared memory. Device code only.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90a/part_chains.cuh"

namespace awqd::cuda {
namespace {

// Where this thread's counterpart in part `from` leaves set `set` of what it sends to part `to`.
template <class Config>
__device__ __forceinline__ uint32_t SentAddress(const Ring<Config>& ring, int from, int to, int set,
                                                int group) {
  const int other = from - (from > to ? 1 : 0);
  const int place = (other * Config::kSets + set) * Config::kGroups + group;
  return ring.base +
         (place * (Share<Config>::kSums / 4) * kGroupThreads + threadIdx.x % kGroupThreads) * 16;
}

// Sends part `to` its share of this one's sums.
template <class Config>
__device__ __forceinline__ void Send(const Ring<Config>& ring, int rank, int to, int group,
                                     const PartSums<Config>& sums) {
  const uint32_t arrived = AddressInBlock(ring.Arrived(), to);
#pragma unroll
  for (int set = 0; set < Config::kSets; ++set) {
    const uint32_t at = AddressInBlock(SentAddress(ring, rank, to, set, group), to);
#pragma unroll
    for (int i = 0; i < Share<Config>::kSums; i += 4) {
      PushFloat4(at + i * (kGroupThreads * 4), sums[set] + to * Share<Config>::kSums + i, arrived);
    }
  }
}

// Whether the first chain of all is this one of those in registers.
template <class Config>
__device__ __forceinline__ bool Begins(int part, int set) {
  return (!Config::kPutsDown || Config::kFirstAddsUp) && part + set == 0;
}

// own += what part `from` sent, set by set; the first set of the first part begins it.
template <class Config>
__device__ __forceinline__ void AddSent(const Ring<Config>& ring, int from, int rank, int group,
                                        Sums<Share<Config>>& own) {
#pragma unroll
  for (int set = 0; set < Config::kSets; ++set) {
    const uint32_t at = SentAddress(ring, from, rank, set, group);
#pragma unroll
    for (int i = 0; i < Share<Config>::kSums; i += 4) {
      const uint4 sent = LoadShared16(at + i * (kGroupThreads * 4));
      const float v[4] = {__uint_as_float(sent.x), __uint_as_float(sent.y), __uint_as_float(sent.z),
                          __uint_as_float(sent.w)};
#pragma unroll
      for (int j = 0; j < 4; ++j) own[i + j] = Begins<Config>(from, set) ? v[j] : own[i + j] + v[j];
    }
  }
}

// The same for this part's own.
template <class Config>
__device__ __forceinline__ void AddOwn(int rank, const PartSums<Config>& sums,
                                       Sums<Share<Config>>& own) {
#pragma unroll
  for (int set = 0; set < Config::kSets; ++set) {
#pragma unroll
    for (int i = 0; i < Share<Config>::kSums; ++i) {
      const float v = sums[set][rank * Share<Config>::kSums + i];
      own[i] = Begins<Config>(rank, set) ? v : own[i] + v;
    }
  }
}

// own += what part `part` has in its registers.
template <class Config>
__device__ __forceinline__ void AddPart(const Ring<Config>& ring, int part, int rank, int group,
                                        const PartSums<Config>& sums, Sums<Share<Config>>& own) {
  if (part == rank) {
    AddOwn<Config>(part, sums, own);
  } else {
    AddSent<Config>(ring, part, rank, group, own);
  }
}

// own = the sums of this block's tokens over all parts in the order of K. The ring of a block
// becomes the place for those of the others once all its groups are through.
template <class Config>
__device__ __forceinline__ void Exchange(const PersistentParams& p, const Ring<Config>& ring,
                                         int rank, int group, const PartSums<Config>& sums,
                                         Sums<Share<Config>>& own) {
  ClusterWait();
  NamedBarrier<kGroupThreads>(1 + group);
  const int peer = threadIdx.x % kGroupThreads;
  if (peer < Config::kParts && peer != rank) BarrierArrive(ring.Through(), peer);
  if constexpr (Config::kPutsDown && !Config::kFirstAddsUp) {
    PutDownChains<Config> chains(p, 0, rank, group);
    chains.Load();
    chains.Add(own);
  }
  BarrierWait(ring.Through(), 0);
  // `rank` is no constant, but which registers to take must be one.
#pragma unroll
  for (int part = 0; part < Config::kParts; ++part) {
    if (part != rank) Send<Config>(ring, rank, part, group, sums);
  }
  if constexpr (Config::kPutsDown) {
    PutDownChains<Config> chains(p, 1, rank, group);
    chains.Load();
    BarrierWait(ring.Arrived(), 0);
    AddPart<Config>(ring, 0, rank, group, sums, own);
    chains.Add(own);
    AddPart<Config>(ring, 1, rank, group, sums, own);
  } else {
    BarrierWait(ring.Arrived(), 0);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      AddPart<Config>(ring, part, rank, group, sums, own);
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
