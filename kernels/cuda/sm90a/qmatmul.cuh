// The kernel of the fused product y = x W (+ bias), any codes, activations of 16 bits or INT8,
// sm_90a.
//
// Layout: mma16. Weights are wgmma's A operand: a block decodes them from shared memory into
// registers, once for all tokens of its tile. Tokens are the B operand, which the tensor cores read
// from shared memory. NOTES.md begins with a picture.
//
// Work split: tile_list.h lists the tiles, common/stream_k_schedule.h the work units. The partials
// of a stream-K tile meet in global memory, in the order of K and without atomics (partials.cuh).
// Those of a split-K tile meet in the shared memory of its cluster (split_k.cuh). fixed_order.cuh
// and split_k_accumulators.cuh keep an order of sums that does not depend on the tile.
//
// Limits: K up to 4194304; none on N and m. The layout pads N and K, the copy engine reads zeros
// past k, and results of rows past m are not stored.
#pragma once

#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm90a/consumer.cuh"
#include "kernels/cuda/sm90a/epilogue.cuh"
#include "kernels/cuda/sm90a/fixed_order.cuh"
#include "kernels/cuda/sm90a/partials.cuh"
#include "kernels/cuda/sm90a/producers.cuh"
#include "kernels/cuda/sm90a/split_k.cuh"
#include "kernels/cuda/sm90a/tile_list.h"

namespace awqd::cuda {
namespace {

// Stores the sums of a whole tile, or of the tokens of `Part`, which begin at `token` of the tile.
template <class Config, class Part = Config>
__device__ __forceinline__ void StoreTile(const PersistentParams& p,
                                          const Consumer<Config>& consumer, int tile, int record,
                                          Sums<Part>& sums, int token = 0) {
  const TilePlace place = PlaceOf(tile, p.token_tiles, ColumnTiles<Config>(p));
  const int rank = blockIdx.x % Config::kCluster;
  const int64_t of_all = (place.columns * Config::kCluster + rank) * Config::kRecords + record;
  const int64_t row = of_all * mma16::kTileN + threadIdx.x / 32 % 4 * int64_t{mma16::kRowTile};
  if constexpr (Config::kGrouped) {
    const GroupedTile of = p.tiles[place.tokens];
    Store<Part>(p, {row, of.first_token + token, of.end_token, of.outer, of.bias, of.y_shift},
                sums);
  } else {
    const int64_t first = int64_t{place.tokens} * Config::kTokens;
    const int64_t end = Share<Config>::kEqual ? p.m : min(p.m, first + Config::kTokens);
    const Corner at = {row, first + token, end, p.outer, p.bias, 0};
    if constexpr (Config::kIntegers) {
      StoreIntegers<Part>(p, at, consumer.scales(), sums);
    } else {
      Store<Part>(p, at, sums);
    }
  }
}

// Computes one slice of this block's split. In split-K a cluster has one tile only.
template <class Config>
__device__ __forceinline__ void ConsumeSlice(const PersistentParams& p, const Ring<Config>& ring,
                                             int warpgroup) {
  const int record = warpgroup % Config::kRecords, slice = warpgroup / Config::kRecords;
  Consumer<Config> consumer(p, ring, record, slice);
  WorkUnit work;
  WorkUnits(p.schedule, blockIdx.x).Next(&work);
  if (Config::kSlices > 1) {
    const int steps = SliceSteps<Config>(p, work);
    work.begin += slice * steps;
    work.end = min(work.begin + steps, work.end);
  }
  SliceAccumulators<Config> sums;
  consumer.Enter();
  if constexpr (Config::kStoresKRanges) {
    RunSplitInTurn(p, consumer, work, record, sums[0]);
  } else {
    RunSlice(p, consumer, work, sums);
  }
  Sums<Share<Config>> own;
  const int slice_of_tile = blockIdx.x % Config::kSplits * Config::kSlices + slice;
  Exchange<Config>(p, ring, slice_of_tile, record, sums, own);
  StoreTile<Config, Share<Config>>(p, consumer, work.tile, record, own,
                                   slice_of_tile * Share<Config>::kTokens);
}

// Computes a work unit. True: it was the last of its tile, and `sums` are those of the whole tile,
// fixed up. False: they were stored as partials for a later cluster.
template <class Config>
__device__ __forceinline__ bool ComputeWorkUnit(const PersistentParams& p,
                                                Consumer<Config>& consumer, const WorkUnit& work,
                                                int cluster, int record, Sums<Config>& sums) {
  const StreamKSchedule& s = p.schedule;
  consumer.Enter();
  consumer.Run(work.begin, work.end, work.end, 0, sums);
  if (work.end < s.k_blocks) {
    StorePartials<Config>(p, cluster, 0, record, sums);
    return false;
  }
  if (work.begin > 0) {
    AddPartials<Config>(p, record, ClusterOfStep(s, work.tile * s.k_blocks), cluster, sums);
  }
  return true;
}

template <class Config>
__device__ __forceinline__ void Consume(const PersistentParams& p, const Ring<Config>& ring,
                                        int cluster, int record) {
  Consumer<Config> consumer(p, ring, record);
  WorkUnits units(p.schedule, cluster);
  for (WorkUnit work; units.Next(&work);) {
    // As FilledWorkUnits, which costs a spill here.
    if (IsEmpty<Config>(p, work)) continue;
    if constexpr (Config::kGrouped && Config::kTokenScales) {
      const TilePlace place = PlaceOf(work.tile, p.token_tiles, ColumnTiles<Config>(p));
      consumer.BeginAt(p.tiles[place.tokens].first_token);
    }
    Sums<Config> sums;
    bool done;
    if constexpr (Config::kParks) {
      done = ComputeParked(p, consumer, work, cluster, record, sums);
    } else if constexpr (Config::kFixedOrder) {
      done = ComputeInFixedOrder(p, consumer, work, cluster, record, sums);
    } else {
      done = ComputeWorkUnit(p, consumer, work, cluster, record, sums);
    }
    if (done) StoreTile<Config>(p, consumer, work.tile, record, sums);
    // Without this the compiler assumes that the warp has diverged and uses no uniform registers in
    // the loop over steps: 40 instructions a step more.
    __syncwarp();
  }
}

template <class Config>
__global__ __launch_bounds__(Config::kThreads, /*blocks=*/1) void FusedProduct(
    const __grid_constant__ PersistentParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  LaunchDependents();
  // The shuffle keeps the compiler from computing the address anew in every step.
  const Ring<Config> ring{
      __shfl_sync(0xffffffffu, SharedAddress(shared) + PairTableBytes(Config::Record::kCode), 0),
      Config::Record::kCodesBytes + Metas<Config>(p) * Config::Record::kMetaBytes};
  if constexpr (Config::Record::kCode == CodeKind::kTable) FillPairTable<false>(p.table);
  if (threadIdx.x == 0) {
    PrefetchMap(&p.x);
    PrefetchMap(&p.x_last);
    for (int slot = 0; slot < Config::kSlots; ++slot) {
      BarrierInit(ring.Full(slot), 2);
      BarrierInit(ring.Empty(slot), Config::kCluster * Config::kRecords * 4);
    }
    if (Config::kSplits > 1) {
      BarrierInit(ring.Through(), Config::kSplits * Config::kConsumers);
      BarrierInit(ring.Arrived(), 1);
    }
    BarrierInitFence();
    if (Config::kSplits > 1) {
      BarrierExpect(ring.Arrived(), Share<Config>::Bytes(blockIdx.x % Config::kSplits));
    }
  }
  if (Config::kCluster > 1) {
    ClusterArrive();
    ClusterWait();
  } else {
    __syncthreads();
    if (Config::kSplits > 1) ClusterArrive();
  }
  const int cluster = blockIdx.x / Config::kCluster;
  // Through a shuffle, so that the compiler knows that the whole warp has the same value.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup == Config::kConsumers) {
    ShrinkRegisters<Config::kProducerRegisters>();
    const int rank = blockIdx.x % Config::kCluster;
    if (threadIdx.x == Config::kConsumers * kWarpgroupThreads) {
      ProduceWeights<Config>(p, ring, cluster, rank);
    } else if (threadIdx.x == Config::kConsumers * kWarpgroupThreads + 32) {
      ProduceTokens<Config>(p, ring, cluster, rank);
    } else if (Config::kSignals && threadIdx.x / 32 == Config::kConsumers * 4 + 2) {
      SignalStoredPartials<Config>(p, cluster);
    }
  } else {
    GrowRegisters<Config::kConsumerRegisters>();
    WaitForEarlierKernels();
    if constexpr (Config::kSplits > 1) {
      ConsumeSlice<Config>(p, ring, warpgroup);
    } else {
      Consume<Config>(p, ring, cluster, warpgroup);
    }
  }
}

template <class Config>
absl::Status LaunchConfigured(const PersistentParams& p, const DeviceInfo& device,
                              StreamView stream) {
  const LaunchConfig config{
      .grid = static_cast<unsigned>(p.schedule.clusters * Config::kCluster),
      .block = Config::kThreads,
      .shared_bytes = Config::kSharedBytes,
      .stream = stream,
      .attributes = OverlappedLaunch(device, Config::kCluster * Config::kSplits),
  };
  return Launch<FusedProduct<Config>>("the fused product of sm90a", config, p);
}

inline absl::Status NoSuchTile(const PersistentTile& tile) {
  return absl::InternalError(absl::StrCat("sm90a: no tile of ", tile.tokens, " tokens x ",
                                          tile.records, " records x ", tile.cluster, " blocks x ",
                                          tile.splits, " splits of ", tile.accumulators,
                                          " k-ranges x ", tile.slices, " slices was compiled"));
}

using Launcher = absl::Status (*)(const PersistentParams&, const DeviceInfo&, StreamView);

// The kernel for one kind of records and one entry of the list; null if it is not compiled.
template <DType kX, RecordKind kKind, ProductKind kProduct, const auto& kList, size_t kIndex>
constexpr Launcher LauncherOf() {
  constexpr const TileCost& listed = kList[kIndex];
  if constexpr (Serves(listed, kKind, kX)) {
    return LaunchConfigured<PersistentConfig<kX, kKind, kProduct, listed.tile>>;
  } else {
    return nullptr;
  }
}

template <DType kX, RecordKind kKind, ProductKind kProduct, const auto& kList, size_t... kIndex>
Launcher FindLauncher(const PersistentTile& tile, std::index_sequence<kIndex...>) {
  Launcher found = nullptr;
  ((found = kList[kIndex].tile == tile ? LauncherOf<kX, kKind, kProduct, kList, kIndex>() : found),
   ...);
  return found;
}

}  // namespace

template <DType kX, ProductKind kProduct, const auto& kList, RecordKind... kKinds>
absl::Status LaunchProduct(const PersistentParams& p, const PersistentTile& tile,
                           const DeviceInfo& device, StreamView stream) {
  Launcher launch = nullptr;
  ((p.kind == kKinds ? void(launch = FindLauncher<kX, kKinds, kProduct, kList>(
                                tile, std::make_index_sequence<std::size(kList)>()))
                     : void()),
   ...);
  return launch == nullptr ? NoSuchTile(tile) : launch(p, device, stream);
}

}  // namespace awqd::cuda
