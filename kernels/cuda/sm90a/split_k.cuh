// Split-K over a cluster, and sliced-K within a block: the K of a tile is divided among the blocks
// of a cluster (splits), and the K of a split among the consumers of a block (slices). In the end
// each slice stores some of the tokens: the other slices send it their sums of these through
// distributed shared memory. Device code only.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90a/split_k_accumulators.cuh"

namespace awqd::cuda {
namespace {

// The address, within the block of slice `to`, at which slice `from` stores accumulator `set` for
// this thread of the warpgroup.
template <class Config>
__device__ __forceinline__ uint32_t SentAddress(const Ring<Config>& ring, int from, int to, int set,
                                                int record) {
  const int other = to % Config::kSlices * (Share<Config>::kSlices - 1) + from - (from > to);
  const int place = (other * Config::kAccumulators + set) * Config::kRecords + record;
  return ring.base + (place * (Share<Config>::kSums / 4) * kWarpgroupThreads +
                      threadIdx.x % kWarpgroupThreads) *
                         16;
}

// Sends slice `to` this slice's sums of the tokens that slice `to` stores.
template <class Config>
__device__ __forceinline__ void Send(const Ring<Config>& ring, int slice, int to, int record,
                                     const SliceAccumulators<Config>& sums) {
  const int block = to / Config::kSlices;
  const uint32_t arrived = AddressInBlock(ring.Arrived(), block);
#pragma unroll
  for (int set = 0; set < Config::kAccumulators; ++set) {
    const uint32_t at = AddressInBlock(SentAddress(ring, slice, to, set, record), block);
#pragma unroll
    for (int i = 0; i < Share<Config>::kSums; i += 4) {
      const int sum = to * Share<Config>::kSums + i;
      if (sum >= Config::kSums) continue;
      const auto* from = sums[set] + sum;
      const float v[4] = {ToFloatBits(from[0]), ToFloatBits(from[1]), ToFloatBits(from[2]),
                          ToFloatBits(from[3])};
      PushFloat4(at + i * (kWarpgroupThreads * 4), v, arrived);
    }
  }
}

// Whether this accumulator of this slice holds the tile's first k-range, to which others are added.
template <class Config>
__device__ __forceinline__ bool Begins(int slice, int set) {
  return (!Config::kStoresKRanges || Config::kFirstAddsUp) && slice + set == 0;
}

// own += the sums that slice `from` sent, one accumulator after the other; the tile's first k-range
// replaces `own`. Where this slice has fewer tokens than others, results of the missing ones are
// never stored.
template <class Config>
__device__ __forceinline__ void AddSent(const Ring<Config>& ring, int from, int slice, int record,
                                        Sums<Share<Config>>& own) {
#pragma unroll
  for (int set = 0; set < Config::kAccumulators; ++set) {
    const uint32_t at = SentAddress(ring, from, slice, set, record);
#pragma unroll
    for (int i = 0; i < Share<Config>::kSums; i += 4) {
      const uint4 sent = LoadShared16(at + i * (kWarpgroupThreads * 4));
      const float v[4] = {__uint_as_float(sent.x), __uint_as_float(sent.y), __uint_as_float(sent.z),
                          __uint_as_float(sent.w)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto sum = FromFloatBits<typename Config::Sum>(v[j]);
        own[i + j] = Begins<Config>(from, set) ? sum : own[i + j] + sum;
      }
    }
  }
}

// The same for the sums that this slice has itself.
template <class Config>
__device__ __forceinline__ void AddOwn(int slice, const SliceAccumulators<Config>& sums,
                                       Sums<Share<Config>>& own) {
#pragma unroll
  for (int set = 0; set < Config::kAccumulators; ++set) {
#pragma unroll
    for (int i = 0; i < Share<Config>::kSums; ++i) {
      const int sum = slice * Share<Config>::kSums + i;
      if (sum < Config::kSums) {
        own[i] = Begins<Config>(slice, set) ? sums[set][sum] : own[i] + sums[set][sum];
      }
    }
  }
}

// own += the sums of slice `from`, its own or sent ones.
template <class Config>
__device__ __forceinline__ void AddSlice(const Ring<Config>& ring, int from, int slice, int record,
                                         const SliceAccumulators<Config>& sums,
                                         Sums<Share<Config>>& own) {
  if (from == slice) {
    AddOwn<Config>(from, sums, own);
  } else {
    AddSent<Config>(ring, from, slice, record, own);
  }
}

// own = the sums of the tokens that this slice stores, over all slices in the order of K. They are
// sent into the rings, once all consumers of the cluster have read their last slot.
template <class Config>
__device__ __forceinline__ void Exchange(const PersistentParams& p, const Ring<Config>& ring,
                                         int slice, int record,
                                         const SliceAccumulators<Config>& sums,
                                         Sums<Share<Config>>& own) {
  const int rank = slice / Config::kSlices;
  ClusterWait();
  NamedBarrier<kWarpgroupThreads>(1 + slice % Config::kSlices * Config::kRecords + record);
  const int block = threadIdx.x % kWarpgroupThreads;
  if (block < Config::kSplits) BarrierArrive(ring.Through(), block);
  if constexpr (Config::kStoresKRanges && !Config::kFirstAddsUp) {
    StoredKRanges<Config> k_ranges(p, 0, rank, record);
    k_ranges.Load();
    k_ranges.Add(own);
  }
  BarrierWait(ring.Through(), 0);
  // Registers cannot be indexed at run time, so the loop is unrolled over all slices.
#pragma unroll
  for (int to = 0; to < Share<Config>::kSlices; ++to) {
    if (to != slice) Send<Config>(ring, slice, to, record, sums);
  }
  if constexpr (Config::kStoresKRanges) {
    StoredKRanges<Config> k_ranges(p, 1, rank, record);
    k_ranges.Load();
    BarrierWait(ring.Arrived(), 0);
    AddSlice<Config>(ring, 0, slice, record, sums, own);
    k_ranges.Add(own);
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
