// Consumers that keep the order of sums of common/chains.h: each chain is summed in one
// accumulator, and the chains are added from the first to the last. Device code only.
#pragma once

#include "kernels/cuda/sm90a/consumer.cuh"
#include "kernels/cuda/sm90a/cut_sums.cuh"

namespace awqd::cuda {
namespace {

// The slots in which a cluster that has a tile's first steps leaves its sums to the next cluster:
// the total of its whole chains, and the open chain, which the cut goes through.
constexpr int kTotalSlot = 0;
constexpr int kOpenSlot = 1;
// The slot in which a cluster parks the total of a tile that it finishes.
constexpr int kParkSlot = 2;

// For a piece that does not begin its tile: whether the cluster before leaves it a total, and an
// open chain.
__device__ __forceinline__ bool HasTotal(const PersistentParams& p, const Piece& piece) {
  return piece.begin >= p.chain;
}
__device__ __forceinline__ bool HasOpen(const PersistentParams& p, const Piece& piece) {
  return piece.begin % p.chain != 0;
}

template <class Config>
__device__ __forceinline__ void AwaitLeft(const PersistentParams& p, const Piece& piece,
                                          int cluster, int record) {
  const int slot = threadIdx.x % kWarpgroupThreads;
  if ((slot == kTotalSlot && HasTotal(p, piece)) || (slot == kOpenSlot && HasOpen(p, piece))) {
    AwaitSet(p, SetOf<Config>(p, cluster - 1, slot, record));
  }
  NamedBarrier<kWarpgroupThreads>(1 + record);
}

template <class Config>
__device__ __forceinline__ void Resume(const PersistentParams& p, const Piece& piece, int cluster,
                                       int record, Sums<Config>& total, Sums<Config>& open) {
  AwaitLeft<Config>(p, piece, cluster, record);
  if (HasTotal(p, piece)) {
    PickUp<Config, false>(p, SetOf<Config>(p, cluster - 1, kTotalSlot, record), total);
  }
  if (HasOpen(p, piece)) {
    PickUp<Config, false>(p, SetOf<Config>(p, cluster - 1, kOpenSlot, record), open);
  }
}

// Finishes a tile in parts on the cluster that has the last part. sums = the first part's total,
// plus every chain of the other parts. This cluster has put down all its chains but the last, which
// `last` holds.
template <class Config>
__device__ __forceinline__ void Join(const PersistentParams& p, int cluster, int record,
                                     int own_chains, const Sums<Config>& last, Sums<Config>& sums) {
  const int first = cluster - (p.schedule.parts - 1);
  const int chains = (p.schedule.parts - 2) * p.slots + own_chains - 1;
  for (int i = threadIdx.x % kWarpgroupThreads; i <= chains; i += kWarpgroupThreads) {
    const int from = (i - 1) / p.slots, slot = i - 1 - from * p.slots;
    const int set = i == 0 ? SetOf<Config>(p, first, 0, record)
                           : SetOf<Config>(p, first + 1 + from, slot, record);
    AwaitSet(p, set);
  }
  NamedBarrier<kWarpgroupThreads>(1 + record);
  PickUp<Config, false>(p, SetOf<Config>(p, first, 0, record), sums);
  // Sets of neighbouring clusters follow each other.
  constexpr int kNext = Config::kCluster * Config::kRecords;
  int set = SetOf<Config>(p, first + 1, 0, record);
  for (int i = 0; i < chains; ++i, set += kNext) PickUp<Config, true>(p, set, sums);
#pragma unroll
  for (int i = 0; i < Config::kSums; ++i) sums[i] += last[i];
}

// ComputePiece of qmatmul.cuh, chain by chain: `open` has the sums of the chain under way, `total`
// those of the chains before it.
template <class Config>
__device__ __forceinline__ bool ComputeChains(const PersistentParams& p, Consumer<Config>& consumer,
                                              const Piece& piece, int cluster, int record,
                                              Sums<Config>& total) {
  const int k_blocks = p.schedule.k_blocks, chain = p.chain;
  const bool ends = piece.end == k_blocks;
  // In parts: a part that is not the first cannot add up its chains before it has the total of the
  // parts before it.
  const bool waits = p.schedule.parts > 0 && piece.begin > 0;
  Sums<Config> open;
  bool resumes = false;
  if (piece.begin > 0 && !waits) {
    Resume<Config>(p, piece, cluster, record, total, open);
    resumes = piece.begin % chain != 0;
  }
  bool first = piece.begin < chain;
  int put_down = 0;
  int begin = piece.begin, end = piece.begin / chain * chain + chain;
  consumer.Enter();
  for (;; begin = end, end += chain, resumes = false) {
    end = min(end, piece.end);
    if (!resumes) Clear<Config>(open);
    consumer.Run(begin, end, piece.end, 1, open);
    // The tile's last chain is added by Join, a chain that the cut goes through by the next
    // cluster.
    const bool stays_open = waits ? ends : end % chain != 0 && !ends;
    if (end == piece.end && stays_open) break;
    if (waits) {
      PutDown<Config>(p, cluster, put_down++, record, open);
    } else {
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) total[i] = first ? open[i] : total[i] + open[i];
      first = false;
    }
    if (end == piece.end) break;
  }
  if (ends) {
    if (waits) Join<Config>(p, cluster, record, put_down + 1, open, total);
    return true;
  }
  if (waits) return false;
  if (!first) PutDown<Config>(p, cluster, kTotalSlot, record, total);
  if (piece.end % chain != 0) PutDown<Config>(p, cluster, kOpenSlot, record, open);
  return false;
}

// ComputeChains where the sums of one chain fill the registers. Each thread parks the total of the
// chains before in global memory, where it stays in L2, and reads it back at the chain's end. A
// tile is cut once at most. In the end `open` has the sums of all chains.
template <class Config>
__device__ __forceinline__ bool ComputeParked(const PersistentParams& p, Consumer<Config>& consumer,
                                              const Piece& piece, int cluster, int record,
                                              Sums<Config>& open) {
  const int chain = p.chain;
  const bool ends = piece.end == p.schedule.k_blocks;
  // A total that the next cluster needs is parked where that cluster looks for it.
  const int park = SetOf<Config>(p, cluster, ends ? kParkSlot : kTotalSlot, record);
  float4* const parked = SetAddress<Config>(p, park);
  const float4* total = nullptr;
  bool resumes = false;
  if (piece.begin > 0) {
    AwaitLeft<Config>(p, piece, cluster, record);
    if (HasTotal(p, piece)) {
      total = SetAddress<Config>(p, SetOf<Config>(p, cluster - 1, kTotalSlot, record));
    }
    resumes = HasOpen(p, piece);
    if (resumes) {
      PickUp<Config, false>(p, SetOf<Config>(p, cluster - 1, kOpenSlot, record), open);
    }
  }
  int begin = piece.begin, end = piece.begin / chain * chain + chain;
  consumer.Enter();
  for (;; begin = end, end += chain, resumes = false) {
    end = min(end, piece.end);
    if (!resumes) Clear<Config>(open);
    consumer.Run(begin, end, piece.end, 1, open);
    const bool whole = end % chain == 0 || ends;
    if (end == piece.end && !whole) break;
    if (total != nullptr) ReadSet<Config, true>(total, open);
    if (end == piece.end && ends) return true;
    WriteSet<Config>(parked, open);
    total = parked;
    if (end == piece.end) break;
  }
  if (total != nullptr) AnnounceSet(p, park, record);
  if (piece.end % chain != 0) PutDown<Config>(p, cluster, kOpenSlot, record, open);
  return false;
}

}  // namespace
}  // namespace awqd::cuda
