// The model of what a tile costs that tiles.cc chooses by.
//
// A call takes the steps of its clusters, which depend on the tile (tile_list.h), and what is
// around them, which depends on how large tiles are and how they are cut. The latter is fitted to
// 2359 cases with FP16 and 4 bits together, 227 tiles at one to four tiles of tokens of eight layer
// shapes from 4096 x 4096 to 8192 x 57344; H100, 2026-11-23. What is chosen takes 0.2 % longer than
// the fastest that was timed, on average.
#pragma once

#include <numeric>

#include "kernels/cuda/sm90a/schedule.h"
#include "kernels/cuda/sm90a/tile_list.h"
#include "kernels/types.h"

namespace awqd::cuda {

// What is around the steps, in microseconds. `size`: of a block's tile, 1 for 128 tokens x 64
// features.
constexpr double TileSize(const PersistentTile& tile) { return tile.tokens * tile.records / 128.0; }

// Steps take less time by this share of the multiprocessors that are idle: what there is of power
// and L2 is for the others.
inline constexpr double kIdleGain = 0.3;

// Of parts that meet in a cluster: to start, to exchange sums, to store; more with slices.
constexpr double PartsUs(double size) { return 3.1 + size; }
inline constexpr double kSlicesUs = 0.45;

// Of other tiles: to start, more for pairs of blocks; to store each.
inline constexpr double kStartUs = 1.2;
inline constexpr double kPairUs = 1.0;
constexpr double StoreUs(double size) { return size; }

// Where tiles are cut anywhere: to put sums down; to take over those of an earlier cluster.
constexpr double PutDownUs(double size) { return 1.2 * size; }
constexpr double TakeOverUs(double size) { return 0.9 + 0.2 * size; }

// Where the order of sums is kept: to go on from the sums of the cluster before; to meet the other
// parts of a tile, to take over from each of them, and each of its chains; to put down a chain
// before a part's last, all blocks at once; the same for a record of a part that meets the other in
// a cluster.
inline constexpr double kGoOnUs = 6.0;
inline constexpr double kMeetPartsUs = 0.9;
inline constexpr double kTakeOverPartUs = 0.6;
constexpr double TakeOverChainUs(double size) { return 0.5 * size; }
constexpr double PutDownChainUs(double size) { return 0.2 * size * size; }
inline constexpr double kPutDownChainOfRecordUs = 0.8;

// To add a chain to the total of those before: parked in global memory, or from 176 tokens on
// partly in local memory.
constexpr double JoinUs(int tokens) {
  return PersistentParks(tokens) ? 2.3 : tokens > 160 ? 0.4 : 0;
}

// Clusters that the sums of a cut tile come from, at most. Without their common divisor, `runs`
// runs of steps are as long as `tiles` tiles, and these begin at every multiple of 1 / tiles within
// a run.
inline int MostClustersOfTile(const Schedule& s) {
  const int common = std::gcd(s.split, s.clusters);
  const int tiles = s.split / common, runs = s.clusters / common;
  if (tiles == 1) return runs;
  return runs / tiles + (runs % tiles == 1 ? 1 : 2);
}

inline double StepUs(const Schedule& s, const TileCost& cost, DType x, int sm_count) {
  const double busy = static_cast<double>(s.clusters) * cost.tile.cluster / sm_count;
  return (x == DType::kBf16 ? cost.bf16_us : cost.fp16_us) * (1 - kIdleGain * (1 - busy));
}

inline double PartsMicroseconds(const PersistentTile& tile, double steps_us) {
  return steps_us + PartsUs(TileSize(tile)) + (tile.slices > 1 ? kSlicesUs : 0);
}

// Of `tiles` tiles for each cluster, without what cuts cost.
inline double TilesMicroseconds(const PersistentTile& tile, double steps_us, double tiles) {
  return steps_us + kStartUs + (tile.cluster > 1 ? kPairUs : 0) + tiles * StoreUs(TileSize(tile));
}

// Of the product that is cut so into tiles of this kind, with activations of dtype `x`.
inline double Microseconds(const Schedule& s, const TileCost& cost, DType x, int sm_count) {
  const PersistentTile& tile = cost.tile;
  const double step_us = StepUs(s, cost, x, sm_count), size = TileSize(tile);
  if (tile.parts > 1) return PartsMicroseconds(tile, s.part_steps * step_us);
  const double tiles = static_cast<double>(s.tiles()) / s.clusters;
  const double whole = TilesMicroseconds(tile, tiles * s.k_blocks * step_us, tiles);
  if (s.split == 0) return whole;
  return whole + PutDownUs(size) + (MostClustersOfTile(s) - 1) * TakeOverUs(size);
}

// The same where the order of sums is kept, of a weight of so many chains of `length` steps.
inline double ChainedMicroseconds(const Schedule& s, const TileCost& cost, DType x, int chains,
                                  int length, int sm_count) {
  const PersistentTile& tile = cost.tile;
  const double step_us = StepUs(s, cost, x, sm_count), size = TileSize(tile);
  const int part_chains = s.part_steps / length;
  if (tile.parts > 1) {
    const int put_down = tile.sets == 0 ? tile.records * (part_chains - 1) : 0;
    return PartsMicroseconds(tile, s.part_steps * step_us) + put_down * kPutDownChainOfRecordUs;
  }
  if (s.parts > 0) {
    return TilesMicroseconds(tile, s.part_steps * step_us, 1) +
           (part_chains - 1) * PutDownChainUs(size) + kMeetPartsUs +
           (s.parts - 1) * (kTakeOverPartUs + part_chains * TakeOverChainUs(size));
  }
  const double tiles = static_cast<double>(s.tiles()) / s.clusters;
  return TilesMicroseconds(tile, tiles * s.k_blocks * step_us, tiles) +
         (s.split > 0 ? kGoOnUs : 0) + tiles * (chains - 1) * JoinUs(tile.tokens);
}

}  // namespace awqd::cuda
