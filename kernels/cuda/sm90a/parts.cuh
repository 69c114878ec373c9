// Tiles cut along K into parts that the blocks of a cluster take, and these into slices for the
// consumers of a block: each slice stores a share of the tokens and gets the others' sums of it
// through distributed shared memory. Device code only.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90a/part_chains.cuh"

namespace awqd::cuda {
namespace {

// Where this thread's counterpart in slice `from` leaves set `set` of what it sends to slice `to`,
// in the block of that one.
template <class Config>
__device__ __forceinline__ uint32_t SentAddress(const Ring<Config>& ring, int from, int to, int set,
                                                int record) {
  const int other = to % Config::kSlices * (Share<Config>::kSlices - 1) + from - (from > to);
  const int place = (other * Config::kSets + set) * Config::kRecords + record;
  return ring.base + (place * (Share<Config>::kSums / 4) * kWarpgroupThreads +
                      threadIdx.x % kWarpgroupThreads) *
                         16;
}

// Sends slice `to` its share of this one's sums.
template <class Config>
__device__ __forceinline__ void Send(const Ring<Config>& ring, int slice, int to, int record,
                                     const SliceSums<Config>& sums) {
  const int block = to / Config::kSlices;
  const uint32_t arrived = AddressInBlock(ring.Arrived(), block);
#pragma unroll
  for (int set = 0; set < Config::kSets; ++set) {
    const uint32_t at = AddressInBlock(SentAddress(ring, slice, to, set, record), block);
#pragma unroll
    for (int i = 0; i < Share<Config>::kSums; i += 4) {
      const int sum = to * Share<Config>::kSums + i;
      if (sum < Config::kSums)
        PushFloat4(at + i * (kWarpgroupThreads * 4), sums[set] + sum, arrived);
    }
  }
}

// Whether the first chain of all is this one of those in registers.
template <class Config>
__device__ __forceinline__ bool Begins(int slice, int set) {
  return (!Config::kPutsDown || Config::kFirstAddsUp) && slice + set == 0;
}

// own += what slice `from` sent, set by set; the first set of the first slice begins it. Where this
// slice has fewer tokens, what is read of the others is never stored.
template <class Config>
__device__ __forceinline__ void AddSent(const Ring<Config>& ring, int from, int slice, int record,
                                        Sums<Share<Config>>& own) {
#pragma unroll
  for (int set = 0; set < Config::kSets; ++set) {
    const uint32_t at = SentAddress(ring, from, slice, set, record);
#pragma unroll
    for (int i = 0; i < Share<Config>::kSums; i += 4) {
      const uint4 sent = LoadShared16(at + i * (kWarpgroupThreads * 4));
      const float v[4] = {__uint_as_float(sent.x), __uint_as_float(sent.y), __uint_as_float(sent.z),
                          __uint_as_float(sent.w)};
#pragma unroll
      for (int j = 0; j < 4; ++j) own[i + j] = Begins<Config>(from, set) ? v[j] : own[i + j] + v[j];
    }
  }
}

// The same for this slice's own.
template <class Config>
__device__ __forceinline__ void AddOwn(int slice, const SliceSums<Config>& sums,
                                       Sums<Share<Config>>& own) {
#pragma unroll
  for (int set = 0; set < Config::kSets; ++set) {
#pragma unroll
    for (int i = 0; i < Share<Config>::kSums; ++i) {
      const int sum = slice * Share<Config>::kSums + i;
      if (sum < Config::kSums) {
        own[i] = Begins<Config>(slice, set) ? sums[set][sum] : own[i] + sums[set][sum];
      }
    }
  }
}

// own += what slice `from` has in its registers.
template <class Config>
__device__ __forceinline__ void AddSlice(const Ring<Config>& ring, int from, int slice, int record,
                                         const SliceSums<Config>& sums, Sums<Share<Config>>& own) {
  if (from == slice) {
    AddOwn<Config>(from, sums, own);
  } else {
    AddSent<Config>(ring, from, slice, record, own);
  }
}

// own = the sums of this slice's tokens over all slices in the order of K. The ring of a block
// becomes the place for those of the others once all consumers are through.
template <class Config>
__device__ __forceinline__ void Exchange(const PersistentParams& p, const Ring<Config>& ring,
                                         int slice, int record, const SliceSums<Config>& sums,
                                         Sums<Share<Config>>& own) {
  const int rank = slice / Config::kSlices;
  ClusterWait();
  NamedBarrier<kWarpgroupThreads>(1 + slice % Config::kSlices * Config::kRecords + record);
  const int block = threadIdx.x % kWarpgroupThreads;
  if (block < Config::kParts) BarrierArrive(ring.Through(), block);
  if constexpr (Config::kPutsDown && !Config::kFirstAddsUp) {
    PutDownChains<Config> chains(p, 0, rank, record);
    chains.Load();
    chains.Add(own);
  }
  BarrierWait(ring.Through(), 0);
  // `slice` is no constant, but which registers to take must be one.
#pragma unroll
  for (int to = 0; to < Share<Config>::kSlices; ++to) {
    if (to != slice) Send<Config>(ring, slice, to, record, sums);
  }
  if constexpr (Config::kPutsDown) {
    PutDownChains<Config> chains(p, 1, rank, record);
    chains.Load();
    BarrierWait(ring.Arrived(), 0);
    AddSlice<Config>(ring, 0, slice, record, sums, own);
    chains.Add(own);
    AddSlice<Config>(ring, 1, slice, record, sums, own);
  } else {
    BarrierWait(ring.Arrived(), 0);
#pragma unroll
    for (int from = 0; from < Share<Config>::kSlices; ++from) {
      AddSlice<Config>(ring, from, slice, record, sums, own);
    }
  }
}

}  // namespace
}  // namespace awqd::cuda
