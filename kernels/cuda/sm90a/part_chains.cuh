// What a part of a tile computes and which tokens each slice stores. Where the order of sums is
// kept, a part is computed chain by chain; some chains go through global memory. Device code only.
#pragma once

#include "kernels/cuda/sm90a/consumer.cuh"
#include "kernels/cuda/sm90a/cut_sums.cuh"

namespace awqd::cuda {
namespace {

// The tokens that a slice stores in the end. The tile's tokens are divided equally among all
// slices, in multiples of eight, so that the last slices may have fewer or none. Slices are
// numbered in the order of K, through all parts of a tile.
template <class Config>
struct Share {
  static constexpr int kSlices = Config::kParts * Config::kSlices;
  static constexpr int kTokens = (Config::kTokens / 8 + kSlices - 1) / kSlices * 8;
  static constexpr int kSums = kTokens / 2;
  static constexpr bool kEqual = kTokens * kSlices == Config::kTokens;
  static_assert(kEqual || !Config::kPutsDown);
  static constexpr int kBlockTokens = Config::kSlices * kTokens;
  static_assert((Config::kParts - 1) * kBlockTokens < Config::kTokens);
  // Bytes that the other slices send for one token: half a sum of each thread.
  static constexpr int kSentBytes =
      (kSlices - 1) * Config::kSets * Config::kRecords * kWarpgroupThreads * int{sizeof(float)} / 2;
  static_assert(kBlockTokens * kSentBytes <= Config::kSlots * Config::kSlotBytes);

  // Bytes that other slices send to block `rank`.
  static __device__ __forceinline__ int Bytes(int rank) {
    return min(Config::kTokens - rank * kBlockTokens, kBlockTokens) * kSentBytes;
  }
};

// What a slice holds in registers when its steps are done: its sums; where the order of sums is
// kept, those of each of its chains, or of its last chain only if it put down the others.
template <class Config>
using SliceSums = Sums<Config>[Config::kSets];

// Computes a slice whose sums all stay in registers. Sums are set to zero first; letting the first
// wgmma ignore them instead would make ptxas serialise wgmma (NOTES.md).
template <class Config>
__device__ __forceinline__ void RunSlice(const PersistentParams& p, Consumer<Config>& consumer,
                                         const Piece& piece, SliceSums<Config>& sums) {
  int begin = piece.begin;
#pragma unroll
  for (int set = 0; set < Config::kSets; ++set) {
    Clear<Config>(sums[set]);
    const int end = set + 1 < Config::kSets ? begin + p.chain : piece.end;
    consumer.Run(begin, end, piece.end, 1, sums[set]);
    begin = end;
  }
}

// The same where registers have no room for every chain. If they have room for a total, the first
// part adds each chain to it at once. Otherwise a part puts each chain but its last down in global
// memory, where it stays in L2 until both parts read what they need of it. They are announced
// half-way through the last chain: by then the stores have arrived, so the fence need not wait.
template <class Config>
__device__ __forceinline__ void RunPartInTurn(const PersistentParams& p, Consumer<Config>& consumer,
                                              const Piece& piece, int record, Sums<Config>& sums) {
  const bool adds_up = Config::kFirstAddsUp && piece.begin == 0;
  int put_down = 0, begin = piece.begin;
  bool announced = false;
  Sums<Config> open;
  Clear<Config>(open);
  while (begin < piece.end) {
    const int end = min((begin / p.chain + 1) * p.chain, piece.end);
    const bool announces = end == piece.end && put_down > 0 && !announced;
    const int stop = announces ? (begin + end + 1) / 2 : end;
    consumer.Run(begin, stop, piece.end, 1, open);
    if (announces) {
      AnnounceSet(p, SetOf<Config>(p, blockIdx.x, 0, record), record);
      announced = true;
    } else if (adds_up) {
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) sums[i] = begin == 0 ? open[i] : sums[i] + open[i];
      Clear<Config>(open);
    } else if (end < piece.end) {
      WriteSet<Config>(SetAddress<Config>(p, SetOf<Config>(p, blockIdx.x, put_down, record)), open);
      ++put_down;
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

// Reads what a part put down, as far as this thread stores the tokens.
template <class Config>
class PutDownChains {
 public:
  // Waits until it is there, if the other part put it down.
  __device__ __forceinline__ PutDownChains(const PersistentParams& p, int part, int rank,
                                           int record)
      : first_(part == 0) {
    const Schedule& s = p.schedule;
    left_ = (min(s.part_steps, s.k_blocks - part * s.part_steps) - 1) / p.chain;
    const int set = SetOf<Config>(p, blockIdx.x - rank + part, 0, record);
    if (part != rank && left_ > 0) {
      if (threadIdx.x % kWarpgroupThreads == 0) AwaitSet(p, set);
      NamedBarrier<kWarpgroupThreads>(1 + record);
    }
    at_ = SetAddress<Config>(p, set) + rank * kFloat4s * kWarpgroupThreads;
  }

  // Starts to read as many chains as there are registers for.
  __device__ __forceinline__ void Load() {
#pragma unroll
    for (int c = 0; c < kTogether; ++c) {
#pragma unroll
      for (int i = 0; i < kFloat4s; ++i) {
        if (c < left_) chains_[c][i] = __ldcg(at_ + c * kNext + i * kWarpgroupThreads);
      }
    }
  }

  // own += all chains in their order; call Load first. The first chain of the first part replaces
  // `own`.
  __device__ __forceinline__ void Add(Sums<Share<Config>>& own) {
    while (left_ > 0) {
#pragma unroll
      for (int c = 0; c < kTogether; ++c) {
        if (c < left_) AddChain(chains_[c], own);
      }
      left_ -= kTogether, at_ += kTogether * kNext;
      Load();
    }
  }

 private:
  static constexpr int kFloat4s = Share<Config>::kSums / 4;
  static constexpr int kTogether = Config::kRecords <= 2 ? 3 : 1;
  static constexpr int kNext = Config::kRecords * (Config::kSums / 4) * kWarpgroupThreads;

  __device__ __forceinline__ void AddChain(const float4 (&chain)[kFloat4s],
                                           Sums<Share<Config>>& own) {
#pragma unroll
    for (int i = 0; i < kFloat4s; ++i) {
      const float v[4] = {chain[i].x, chain[i].y, chain[i].z, chain[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) own[i * 4 + j] = first_ ? v[j] : own[i * 4 + j] + v[j];
    }
    first_ = false;
  }

  bool first_;
  int left_;
  const float4* at_;
  float4 chains_[kTogether][kFloat4s];
};

}  // namespace
}  // namespace awqd::cuda
