// Consumers of fixed-order products (common/fixed_order.h): each k-range is summed in one
// accumulator, and the k-ranges are added from the first to the last. Device code only.
#pragma once

#include "kernels/cuda/sm90a/consumer.cuh"
#include "kernels/cuda/sm90a/partials.cuh"

namespace awqd::cuda {
namespace {

// The slots in which a cluster that has a tile's first steps stores partials for the next cluster:
// the total of its complete k-ranges, and the open k-range, which the next cluster continues.
constexpr int kTotalSlot = 0;
constexpr int kOpenSlot = 1;
// The slot in which a cluster keeps the total of a tile that it fixes up.
constexpr int kParkSlot = 2;

// For a work unit that does not begin its tile: whether the cluster before stores a total for it,
// and an open k-range.
__device__ __forceinline__ bool HasTotal(const PersistentParams& p, const WorkUnit& work) {
  return work.begin >= p.k_range;
}
__device__ __forceinline__ bool HasOpen(const PersistentParams& p, const WorkUnit& work) {
  return work.begin % p.k_range != 0;
}

template <class Config>
__device__ __forceinline__ void AwaitLeft(const PersistentParams& p, const WorkUnit& work,
                                          int cluster, int record) {
  const int slot = threadIdx.x % kWarpgroupThreads;
  if ((slot == kTotalSlot && HasTotal(p, work)) || (slot == kOpenSlot && HasOpen(p, work))) {
    AwaitPartials(p, PartialsIndex<Config>(p, cluster - 1, slot, record));
  }
  NamedBarrier<kWarpgroupThreads>(1 + record);
}

template <class Config>
__device__ __forceinline__ void Resume(const PersistentParams& p, const WorkUnit& work, int cluster,
                                       int record, Sums<Config>& total, Sums<Config>& open) {
  AwaitLeft<Config>(p, work, cluster, record);
  if (HasTotal(p, work)) {
    LoadPartials<Config, false>(p, PartialsIndex<Config>(p, cluster - 1, kTotalSlot, record),
                                total);
  }
  if (HasOpen(p, work)) {
    LoadPartials<Config, false>(p, PartialsIndex<Config>(p, cluster - 1, kOpenSlot, record), open);
  }
}

// The fix-up of a split tile, by the cluster that has the last split. sums = the first split's
// total, plus every k-range of the other splits. This cluster has stored all its k-ranges but the
// last, which is in `last`.
template <class Config>
__device__ __forceinline__ void Join(const PersistentParams& p, int cluster, int record,
                                     int own_k_ranges, const Sums<Config>& last,
                                     Sums<Config>& sums) {
  const int first = cluster - (p.schedule.splits - 1);
  const int k_ranges = (p.schedule.splits - 2) * p.slots + own_k_ranges - 1;
  for (int i = threadIdx.x % kWarpgroupThreads; i <= k_ranges; i += kWarpgroupThreads) {
    const int from = (i - 1) / p.slots, slot = i - 1 - from * p.slots;
    const int set = i == 0 ? PartialsIndex<Config>(p, first, 0, record)
                           : PartialsIndex<Config>(p, first + 1 + from, slot, record);
    AwaitPartials(p, set);
  }
  NamedBarrier<kWarpgroupThreads>(1 + record);
  LoadPartials<Config, false>(p, PartialsIndex<Config>(p, first, 0, record), sums);
  // Partials of neighbouring clusters follow each other.
  constexpr int kNext = Config::kCluster * Config::kRecords;
  int set = PartialsIndex<Config>(p, first + 1, 0, record);
  for (int i = 0; i < k_ranges; ++i, set += kNext) LoadPartials<Config, true>(p, set, sums);
#pragma unroll
  for (int i = 0; i < Config::kSums; ++i) sums[i] += last[i];
}

// ComputeWorkUnit of qmatmul.cuh, k-range by k-range: `open` has the sums of the current k-range,
// `total` those of the k-ranges before it.
template <class Config>
__device__ __forceinline__ bool ComputeInFixedOrder(const PersistentParams& p,
                                                    Consumer<Config>& consumer,
                                                    const WorkUnit& work, int cluster, int record,
                                                    Sums<Config>& total) {
  const int k_blocks = p.schedule.k_blocks, k_range = p.k_range;
  const bool ends = work.end == k_blocks;
  // A split that is not the first cannot add up its k-ranges before it has the total of the splits
  // before it.
  const bool waits = p.schedule.splits > 0 && work.begin > 0;
  Sums<Config> open;
  bool resumes = false;
  if (work.begin > 0 && !waits) {
    Resume<Config>(p, work, cluster, record, total, open);
    resumes = work.begin % k_range != 0;
  }
  bool first = work.begin < k_range;
  int stored = 0;
  int begin = work.begin, end = work.begin / k_range * k_range + k_range;
  consumer.Enter();
  for (;; begin = end, end += k_range, resumes = false) {
    end = min(end, work.end);
    if (!resumes) Clear<Config>(open);
    consumer.Run(begin, end, work.end, 1, open);
    // Join adds the tile's last k-range. The next cluster completes a k-range that ends within its
    // work unit.
    const bool stays_open = waits ? ends : end % k_range != 0 && !ends;
    if (end == work.end && stays_open) break;
    if (waits) {
      StorePartials<Config>(p, cluster, stored++, record, open);
    } else {
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) total[i] = first ? open[i] : total[i] + open[i];
      first = false;
    }
    if (end == work.end) break;
  }
  if (ends) {
    if (waits) Join<Config>(p, cluster, record, stored + 1, open, total);
    return true;
  }
  if (waits) return false;
  if (!first) StorePartials<Config>(p, cluster, kTotalSlot, record, total);
  if (work.end % k_range != 0) StorePartials<Config>(p, cluster, kOpenSlot, record, open);
  return false;
}

// ComputeInFixedOrder where the sums of one k-range fill the registers. Each thread keeps the total
// of the k-ranges before in global memory, where it stays in L2, and reads it back at the end of
// the k-range. A tile is split once at most. In the end `open` has the sums of all k-ranges.
template <class Config>
__device__ __forceinline__ bool ComputeParked(const PersistentParams& p, Consumer<Config>& consumer,
                                              const WorkUnit& work, int cluster, int record,
                                              Sums<Config>& open) {
  const int k_range = p.k_range;
  const bool ends = work.end == p.schedule.k_blocks;
  // A total that the next cluster needs is stored where that cluster reads it.
  const int park = PartialsIndex<Config>(p, cluster, ends ? kParkSlot : kTotalSlot, record);
  float4* const parked = PartialsAddress<Config>(p, park);
  const float4* total = nullptr;
  bool resumes = false;
  if (work.begin > 0) {
    AwaitLeft<Config>(p, work, cluster, record);
    if (HasTotal(p, work)) {
      total = PartialsAddress<Config>(p, PartialsIndex<Config>(p, cluster - 1, kTotalSlot, record));
    }
    resumes = HasOpen(p, work);
    if (resumes) {
      LoadPartials<Config, false>(p, PartialsIndex<Config>(p, cluster - 1, kOpenSlot, record),
                                  open);
    }
  }
  int begin = work.begin, end = work.begin / k_range * k_range + k_range;
  consumer.Enter();
  for (;; begin = end, end += k_range, resumes = false) {
    end = min(end, work.end);
    if (!resumes) Clear<Config>(open);
    consumer.Run(begin, end, work.end, 1, open);
    const bool whole = end % k_range == 0 || ends;
    if (end == work.end && !whole) break;
    if (total != nullptr) ReadPartials<Config, true>(total, open);
    if (end == work.end && ends) return true;
    WritePartials<Config>(parked, open);
    total = parked;
    if (end == work.end) break;
  }
  if (total != nullptr) SignalPartials(p, park, record);
  if (work.end % k_range != 0) StorePartials<Config>(p, cluster, kOpenSlot, record, open);
  return false;
}

}  // namespace
}  // namespace awqd::cuda
