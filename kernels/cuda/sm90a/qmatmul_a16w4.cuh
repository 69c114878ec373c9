// The kernel of the persistent product y = x W (+ bias), 16-bit activations, 4-bit weights, sm_90a.
//
// Layout: mma16. Weights are wgmma's A operand, decoded from shared memory into registers, once per
// block whatever the number of tokens; tokens are its B operand, read by the tensor cores from
// shared memory. One block per multiprocessor. Two producer threads keep the ring full with bulk
// copies (records as they lie in memory, tokens by the tensor copy engine, shared by the blocks of
// a cluster through multicast), one to three consumer groups of four warps own 64 out features
// each, or twice as many groups share them, two with a slice of K each. A consumer decodes one
// operand while the tensor cores work on the one before. compiled_tiles.h says which tiles there
// are, schedule.h says who computes what. Sums of cut tiles meet in global memory in the order of
// K, without atomics (cut_sums.cuh), or where the blocks of a cluster take parts of a tile, in
// their shared memory (parts.cuh); chained.cuh and part_chains.cuh keep an order that does not
// depend on the tiles. Limits: K up to 4194304; none on N and m: the layout pads N and K, the copy
// engine reads zeros past k, and what comes of rows past m is not stored.
#pragma once

#include <cstddef>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/attributes.h"
#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm90a/chained.cuh"
#include "kernels/cuda/sm90a/compiled_tiles.h"
#include "kernels/cuda/sm90a/consumer.cuh"
#include "kernels/cuda/sm90a/cut_sums.cuh"
#include "kernels/cuda/sm90a/parts.cuh"
#include "kernels/cuda/sm90a/producers.cuh"
#include "kernels/cuda/sm90a/store.cuh"

namespace awqd::cuda {
namespace {

// `Part`: of a tile's tokens, from `token` on.
template <class Config, class Part = Config>
__device__ __forceinline__ void StoreTile(const PersistentParams& p, int tile, int group,
                                          Sums<Part>& sums, int token = 0) {
  const TilePlace place = PlaceOf(tile, p.token_tiles, ColumnTiles<Config>(p));
  const int rank = blockIdx.x % Config::kCluster;
  const int64_t record = (place.columns * Config::kCluster + rank) * Config::kGroups + group;
  const int64_t row = record * mma16::kTileN + threadIdx.x / 32 % 4 * int64_t{mma16::kRowTile};
  const int64_t first = int64_t{place.tokens} * Config::kTokens;
  const int64_t end = Share<Config>::kEqual ? p.m : min(p.m, first + Config::kTokens);
  Store<Part>(p, {row, first + token, end}, sums);
}

// A slice of this block's part of the only tile that its cluster takes.
template <class Math, class Config>
__device__ __forceinline__ void ConsumeSlice(const PersistentParams& p, const Ring<Config>& ring,
                                             int warp_group) {
  const int group = warp_group % Config::kGroups, slice = warp_group / Config::kGroups;
  Consumer<Math, Config> consumer(p, ring, group, slice);
  Piece piece;
  Pieces(p.schedule, blockIdx.x).Next(&piece);
  if (Config::kSlices > 1) {
    const int steps = SliceSteps<Config>(p, piece);
    piece.begin += slice * steps;
    piece.end = min(piece.begin + steps, piece.end);
  }
  SliceSums<Config> sums;
  consumer.Enter();
  if constexpr (Config::kPutsDown) {
    RunPartInTurn(p, consumer, piece, group, sums[0]);
  } else {
    RunSlice(p, consumer, piece, sums);
  }
  Sums<Share<Config>> own;
  const int slice_of_tile = blockIdx.x % Config::kParts * Config::kSlices + slice;
  Exchange<Config>(p, ring, slice_of_tile, group, sums, own);
  StoreTile<Config, Share<Config>>(p, piece.tile, group, own,
                                   slice_of_tile * Share<Config>::kTokens);
}

// sums = those of a piece that ends its tile, with what the clusters before put down; false where
// they were put down for a cluster after.
template <class Math, class Config>
__device__ __forceinline__ bool ComputePiece(const PersistentParams& p,
                                             Consumer<Math, Config>& consumer, const Piece& piece,
                                             int cluster, int group, Sums<Config>& sums) {
  const Schedule& s = p.schedule;
  consumer.Enter();
  consumer.Run(piece.begin, piece.end, piece.end, 0, sums);
  if (piece.end < s.k_blocks) {
    PutDown<Config>(p, cluster, 0, group, sums);
    return false;
  }
  if (piece.begin > 0) {
    AddEarlier<Config>(p, group, RunOf(s, piece.tile * s.k_blocks), cluster, sums);
  }
  return true;
}

template <class Math, class Config>
__device__ __forceinline__ void Consume(const PersistentParams& p, const Ring<Config>& ring,
                                        int cluster, int group) {
  Consumer<Math, Config> consumer(p, ring, group);
  Pieces pieces(p.schedule, cluster);
  for (Piece piece; pieces.Next(&piece);) {
    Sums<Config> sums;
    bool done;
    if constexpr (Config::kParks) {
      done = ComputeParked(p, consumer, piece, cluster, group, sums);
    } else if constexpr (Config::kChained) {
      done = ComputeChains(p, consumer, piece, cluster, group, sums);
    } else {
      done = ComputePiece(p, consumer, piece, cluster, group, sums);
    }
    if (done) StoreTile<Config>(p, piece.tile, group, sums);
    // Or the compiler takes the warp for divided and the loop over steps does without the uniform
    // registers: 40 instructions a step more.
    __syncwarp();
  }
}

template <class Math, class Config>
__global__ __launch_bounds__(Config::kThreads, /*blocks=*/1) void PersistentA16W4(
    const __grid_constant__ PersistentParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  LaunchDependents();
  // Through a shuffle, or the compiler computes the address anew in every step of the loop.
  const Ring<Config> ring{__shfl_sync(0xffffffffu, SharedAddress(shared), 0),
                          mma16::kCodesBytes + Metas<Config>(p) * mma16::kMetaBytes};
  if (threadIdx.x == 0) {
    PrefetchMap(&p.x);
    PrefetchMap(&p.x_last);
    for (int slot = 0; slot < Config::kStages; ++slot) {
      BarrierInit(ring.Full(slot), 2);
      BarrierInit(ring.Empty(slot), Config::kCluster * Config::kGroups * 4);
    }
    if (Config::kParts > 1) {
      BarrierInit(ring.Through(), Config::kParts * Config::kConsumers);
      BarrierInit(ring.Arrived(), 1);
    }
    BarrierInitFence();
    if (Config::kParts > 1) {
      BarrierExpect(ring.Arrived(), Share<Config>::Bytes(blockIdx.x % Config::kParts));
    }
  }
  if (Config::kCluster > 1) {
    ClusterArrive();
    ClusterWait();
  } else {
    __syncthreads();
    if (Config::kParts > 1) ClusterArrive();
  }
  const int cluster = blockIdx.x / Config::kCluster;
  // The same for a whole warp, and known to be.
  const int warp_group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  if (warp_group == Config::kConsumers) {
    ShrinkRegisters<Config::kProducerRegisters>();
    const int rank = blockIdx.x % Config::kCluster;
    if (threadIdx.x == Config::kConsumers * kGroupThreads) {
      ProduceWeights<Config>(p, ring, cluster, rank);
    } else if (threadIdx.x == Config::kConsumers * kGroupThreads + 32) {
      ProduceTokens<Config>(p, ring, cluster, rank);
    } else if (Config::kAnnounces && threadIdx.x / 32 == Config::kConsumers * 4 + 2) {
      AnnouncePutDown<Config>(p, cluster);
    }
  } else {
    GrowRegisters<Config::kConsumerRegisters>();
    WaitForEarlierKernels();
    if constexpr (Config::kParts > 1) {
      ConsumeSlice<Math, Config>(p, ring, warp_group);
    } else {
      Consume<Math, Config>(p, ring, cluster, warp_group);
    }
  }
}

template <class Math, class Config>
absl::Status LaunchConfigured(const PersistentParams& p, const DeviceInfo& device,
                              StreamView stream) {
  const Attributes attributes = OverlappedLaunch(device, Config::kCluster * Config::kParts);
  const LaunchConfig config{
      .grid = static_cast<unsigned>(p.schedule.clusters * Config::kCluster),
      .block = Config::kThreads,
      .shared_bytes = PersistentSharedBytes(Config::kTokens, Config::kGroups, Config::kSlices,
                                            Config::kFineGroups),
      .stream = stream,
      .attributes = attributes.list,
      .attribute_count = attributes.count,
  };
  return Launch<PersistentA16W4<Math, Config>>("sm90a/qmatmul_a16w4", config, p);
}

template <class Math, bool kChained, int... kTile>
absl::Status LaunchMetas(const PersistentParams& p, const DeviceInfo& device, StreamView stream) {
  if (p.metas == 1) {
    return LaunchConfigured<Math, PersistentConfig<1, kChained, kTile...>>(p, device, stream);
  }
  if (p.metas == 2) {
    return LaunchConfigured<Math, PersistentConfig<2, kChained, kTile...>>(p, device, stream);
  }
  return LaunchConfigured<Math, PersistentConfig<8, kChained, kTile...>>(p, device, stream);
}

inline absl::Status NoSuchTile(const PersistentTile& tile) {
  return absl::InternalError(absl::StrCat("sm90a/qmatmul_a16w4: no tile of ", tile.tokens,
                                          " tokens x ", tile.groups, " groups x ", tile.cluster,
                                          " blocks x ", tile.parts, " parts of ", tile.sets,
                                          " chains x ", tile.slices, " slices was compiled"));
}

// With the one of `kTiles` that is `tile`.
template <class Math, bool kChained, const auto& kTiles, size_t... kIndex>
absl::Status LaunchOneOf(std::index_sequence<kIndex...>, const PersistentParams& p,
                         const PersistentTile& tile, const DeviceInfo& device, StreamView stream) {
  absl::Status (*launch)(const PersistentParams&, const DeviceInfo&, StreamView) = nullptr;
  ((launch = kTiles[kIndex] == tile
                 ? LaunchMetas<Math, kChained, kTiles[kIndex].tokens, kTiles[kIndex].groups,
                               kTiles[kIndex].cluster, kTiles[kIndex].parts, kTiles[kIndex].sets,
                               kTiles[kIndex].slices>
                 : launch),
   ...);
  return launch == nullptr ? NoSuchTile(tile) : launch(p, device, stream);
}

template <class Math>
absl::Status LaunchTile(const PersistentParams& p, const PersistentTile& tile,
                        const DeviceInfo& device, StreamView stream) {
  constexpr std::make_index_sequence<std::size(kFreeTiles)> kAll;
  return LaunchOneOf<Math, false, kFreeTiles>(kAll, p, tile, device, stream);
}

template <class Math>
absl::Status LaunchChainedTile(const PersistentParams& p, const PersistentTile& tile,
                               const DeviceInfo& device, StreamView stream) {
  constexpr std::make_index_sequence<std::size(kChainedTiles)> kAll;
  return LaunchOneOf<Math, true, kChainedTiles>(kAll, p, tile, device, stream);
}

}  // namespace
}  // namespace awqd::cuda
