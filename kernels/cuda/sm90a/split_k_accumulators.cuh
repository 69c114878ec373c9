// The mainloop of a split-K tile, and which tokens each slice stores. In fixed order a split is
// computed k-range by k-range; some k-ranges go through global memory. Device code only.
#pragma once

#include "kernels/cuda/sm90a/consumer.cuh"
#include "kernels/cuda/sm90a/partials.cuh"

namespace awqd::cuda {
namespace {

// The tokens that a slice stores in the end. The tile's tokens are divided equally among all
// slices, in multiples of eight, so that the last slices may have fewer or none. Slices are
// numbered in the order of K, through all splits of a tile.
template <class Config>
struct Share {
  using Sum = typename Config::Sum;
  static constexpr int kSlices = Config::kSplits * Config::kSlices;
  static constexpr int kTokens = (Config::kTokens / 8 + kSlices - 1) / kSlices * 8;
  static constexpr int kSums = kTokens / 2;
  static constexpr bool kEqual = kTokens * kSlices == Config::kTokens;
  static_assert(kEqual || !Config::kStoresKRanges);
  static constexpr int kBlockTokens = Config::kSlices * kTokens;
  static_assert((Config::kSplits - 1) * kBlockTokens < Config::kTokens);
  // Bytes that the other slices send for one token: half a sum of each thread.
  static constexpr int kSentBytes = (kSlices - 1) * Config::kAccumulators * Config::kRecords *
                                    kWarpgroupThreads * int{sizeof(float)} / 2;
  static_assert(kBlockTokens * kSentBytes <= Config::kSlots * Config::kSlotBytes);

  // Bytes that other slices send to block `rank`.
  static __device__ __forceinline__ int Bytes(int rank) {
    return min(Config::kTokens - rank * kBlockTokens, kBlockTokens) * kSentBytes;
  }
};

// The accumulators of a slice when its steps are done: one set, or in fixed order one for each of
// its k-ranges, or that of its last k-range if it stored the others.
template <class Config>
using SliceAccumulators = Sums<Config>[Config::kAccumulators];

// Computes a slice whose sums all stay in registers. Sums are set to zero first; letting the first
// wgmma ignore them instead would make ptxas serialise wgmma (NOTES.md).
template <class Config>
__device__ __forceinline__ void RunSlice(const PersistentParams& p, Consumer<Config>& consumer,
                                         const WorkUnit& work, SliceAccumulators<Config>& sums) {
  int begin = work.begin;
#pragma unroll
  for (int set = 0; set < Config::kAccumulators; ++set) {
    Clear<Config>(sums[set]);
    const int end = set + 1 < Config::kAccumulators ? begin + p.k_range : work.end;
    consumer.Run(begin, end, work.end, 1, sums[set]);
    begin = end;
  }
}

// The same where registers have no room for every k-range. If they have room for a total, the first
// split adds each k-range to it at once. Otherwise a split stores each k-range but its last in
// global memory, where they stay in L2 until both splits read what they need. They are signalled
// half-way through the last k-range: by then the stores have arrived, so the fence need not wait.
template <class Config>
__device__ __forceinline__ void RunSplitInTurn(const PersistentParams& p,
                                               Consumer<Config>& consumer, const WorkUnit& work,
                                               int record, Sums<Config>& sums) {
  const bool adds_up = Config::kFirstAddsUp && work.begin == 0;
  int stored = 0, begin = work.begin;
  bool announced = false;
  Sums<Config> open;
  Clear<Config>(open);
  while (begin < work.end) {
    const int end = min((begin / p.k_range + 1) * p.k_range, work.end);
    const bool announces = end == work.end && stored > 0 && !announced;
    const int stop = announces ? (begin + end + 1) / 2 : end;
    consumer.Run(begin, stop, work.end, 1, open);
    if (announces) {
      SignalPartials(p, PartialsIndex<Config>(p, blockIdx.x, 0, record), record);
      announced = true;
    } else if (adds_up) {
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) sums[i] = begin == 0 ? open[i] : sums[i] + open[i];
      Clear<Config>(open);
    } else if (end < work.end) {
      WritePartials<Config>(
          PartialsAddress<Config>(p, PartialsIndex<Config>(p, blockIdx.x, stored, record)), open);
      ++stored;
      Clear<Config>(open);
    }
    begin = stop;
    __syncwarp();
  }
  if (!adds_up) {
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) sums[i] = open[i];
  }
}

// Reads the k-ranges that a split stored, for the tokens that this thread stores.
template <class Config>
class StoredKRanges {
 public:
  // Waits for them, if the other split stored them.
  __device__ __forceinline__ StoredKRanges(const PersistentParams& p, int split, int rank,
                                           int record)
      : first_(split == 0) {
    const StreamKSchedule& s = p.schedule;
    left_ = (min(s.split_steps, s.k_blocks - split * s.split_steps) - 1) / p.k_range;
    const int set = PartialsIndex<Config>(p, blockIdx.x - rank + split, 0, record);
    if (split != rank && left_ > 0) {
      if (threadIdx.x % kWarpgroupThreads == 0) AwaitPartials(p, set);
      NamedBarrier<kWarpgroupThreads>(1 + record);
    }
    at_ = PartialsAddress<Config>(p, set) + rank * kFloat4s * kWarpgroupThreads;
  }

  // Starts to read as many k-ranges as there are registers for.
  __device__ __forceinline__ void Load() {
#pragma unroll
    for (int c = 0; c < kTogether; ++c) {
#pragma unroll
      for (int i = 0; i < kFloat4s; ++i) {
        if (c < left_) k_ranges_[c][i] = __ldcg(at_ + c * kNext + i * kWarpgroupThreads);
      }
    }
  }

  // own += all k-ranges in their order; call Load first. The first k-range of the first split
  // replaces `own`.
  __device__ __forceinline__ void Add(Sums<Share<Config>>& own) {
    while (left_ > 0) {
#pragma unroll
      for (int c = 0; c < kTogether; ++c) {
        if (c < left_) AddKRange(k_ranges_[c], own);
      }
      left_ -= kTogether, at_ += kTogether * kNext;
      Load();
    }
  }

 private:
  static constexpr int kFloat4s = Share<Config>::kSums / 4;
  static constexpr int kTogether = Config::kRecords <= 2 ? 3 : 1;
  static constexpr int kNext = Config::kRecords * (Config::kSums / 4) * kWarpgroupThreads;

  __device__ __forceinline__ void AddKRange(const float4 (&k_range)[kFloat4s],
                                            Sums<Share<Config>>& own) {
#pragma unroll
    for (int i = 0; i < kFloat4s; ++i) {
      const float v[4] = {k_range[i].x, k_range[i].y, k_range[i].z, k_range[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) own[i * 4 + j] = first_ ? v[j] : own[i * 4 + j] + v[j];
    }
    first_ = false;
  }

  bool first_;
  int left_;
  const float4* at_;
  float4 k_ranges_[kTogether][kFloat4s];
};

}  // namespace
}  // namespace awqd::cuda
