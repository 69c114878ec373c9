// What the persistent product's tiles cost: the measured numbers that tiles.cc chooses by, alone in
// their file.
//
// A call takes the steps of its clusters, which depend on the tile, and what is around them, which
// depends on how large tiles are and how they are cut. H100, 2026-11-23: 227 tiles, those below and
// others, at one to four tiles of tokens of eight layer shapes from 4096 x 4096 to 8192 x 57344,
// 2359 cases with FP16 and 1082 with BF16. What is around the steps is fitted to all cases with
// FP16 together, then the steps of each tile to its own; both are off by 3 % (root mean square),
// and what is chosen takes 0.2 % longer than the fastest that is compiled, on average. By hand:
// {72, 3, 1}, from the two largest layers alone, and {128, 3, 1, 2} with BF16, from its neighbours.
// NOTES.md has what was left out.
#pragma once

#include <numeric>

#include "kernels/cuda/sm90a/schedule.h"
#include "kernels/cuda/sm90a/tiles.h"
#include "kernels/types.h"

namespace awqd::cuda {

struct TileCost {
  PersistentTile tile;
  // A step, while no multiprocessor is idle, with activations of either type. Decoding to BF16
  // takes longer; where the tensor cores are the limit its products draw less power.
  double fp16_us;
  double bf16_us;
};

// LaunchTile in qmatmul_a16w4.cuh compiles exactly these.
inline constexpr TileCost kTileCosts[] = {
    {{24, 1, 1, 2, 1, 2}, 0.193, 0.227}, {{24, 2, 1, 2}, 0.405, 0.466},
    {{32, 1, 1, 2, 1, 2}, 0.199, 0.233}, {{32, 2, 1, 2, 1, 2}, 0.395, 0.445},
    {{32, 2, 2}, 0.429, 0.481},          {{40, 2, 1, 2}, 0.431, 0.512},
    {{40, 3, 1, 2}, 0.582, 0.718},       {{48, 1, 1, 2, 1, 2}, 0.222, 0.258},
    {{48, 2, 1, 2}, 0.443, 0.520},       {{48, 2, 2}, 0.454, 0.510},
    {{48, 3, 1}, 0.672, 0.748},          {{56, 2, 1, 2}, 0.467, 0.531},
    {{56, 3, 1}, 0.710, 0.769},          {{56, 3, 1, 2}, 0.638, 0.793},
    {{64, 1, 1, 2, 1, 2}, 0.248, 0.272}, {{64, 2, 1, 2}, 0.493, 0.550},
    {{64, 2, 2}, 0.498, 0.556},          {{64, 3, 1}, 0.735, 0.792},
    {{72, 3, 1}, 0.745, 0.839},          {{80, 1, 1, 2, 1, 2}, 0.278, 0.299},
    {{80, 2, 1, 2}, 0.537, 0.602},       {{80, 3, 1}, 0.765, 0.868},
    {{88, 2, 1}, 0.576, 0.628},          {{88, 2, 1, 2}, 0.569, 0.614},
    {{88, 3, 1}, 0.819, 0.899},          {{96, 1, 1, 2, 1, 2}, 0.316, 0.335},
    {{96, 3, 1}, 0.860, 0.947},          {{96, 3, 1, 2}, 0.837, 0.954},
    {{104, 1, 1, 2}, 0.344, 0.380},      {{104, 2, 1}, 0.640, 0.677},
    {{104, 2, 1, 2}, 0.618, 0.667},      {{104, 3, 1}, 0.898, 0.988},
    {{112, 1, 1, 2}, 0.359, 0.392},      {{112, 2, 1, 2}, 0.649, 0.682},
    {{112, 3, 1}, 0.936, 1.011},         {{112, 3, 1, 2}, 0.912, 1.000},
    {{120, 2, 1}, 0.676, 0.716},         {{120, 3, 1}, 0.989, 1.020},
    {{128, 1, 1, 2}, 0.387, 0.412},      {{128, 2, 1}, 0.747, 0.752},
    {{128, 2, 1, 2}, 0.701, 0.741},      {{128, 3, 1}, 1.042, 1.063},
    {{128, 3, 1, 2}, 1.029, 1.117},      {{136, 2, 1}, 0.750, 0.779},
    {{136, 3, 1}, 1.107, 1.114},         {{144, 1, 1, 2}, 0.413, 0.435},
    {{144, 2, 1}, 0.788, 0.801},         {{144, 2, 1, 2}, 0.765, 0.794},
    {{144, 3, 1}, 1.175, 1.164},         {{152, 2, 1}, 0.826, 0.812},
    {{152, 3, 1}, 1.223, 1.210},         {{160, 1, 1, 2}, 0.440, 0.464},
    {{160, 2, 1}, 0.870, 0.846},         {{160, 2, 1, 2}, 0.841, 0.835},
    {{160, 2, 2}, 0.850, 0.839},         {{160, 3, 1}, 1.286, 1.261},
    {{176, 1, 1, 2}, 0.469, 0.488},      {{176, 2, 1}, 0.947, 0.926},
    {{176, 2, 1, 2}, 0.921, 0.895},      {{176, 2, 2}, 0.931, 0.905},
    {{192, 1, 1, 2}, 0.500, 0.520},      {{192, 2, 1}, 1.027, 0.999},
    {{192, 2, 1, 2}, 1.002, 0.979},      {{192, 2, 2}, 1.008, 0.987},
    {{208, 1, 1, 2}, 0.537, 0.550},      {{208, 2, 1, 2}, 1.076, 1.054},
    {{208, 2, 2}, 1.090, 1.054},         {{224, 1, 1, 2}, 0.603, 0.601},
    {{224, 2, 1, 2}, 1.160, 1.123},      {{224, 2, 2}, 1.171, 1.140},
    {{240, 2, 2}, 1.253, 1.211},         {{256, 1, 1, 2}, 0.666, 0.655},
    {{256, 2, 1, 2}, 1.316, 1.280},      {{256, 2, 2}, 1.337, 1.291},
};

// The same for tiles that keep the order of sums: LaunchChainedTile.
inline constexpr TileCost kChainedTileCosts[] = {
    {{24, 1, 1, 2, 1, 2}, 0.201, 0.234},  {{24, 1, 1, 2, 2, 2}, 0.200, 0.230},
    {{24, 2, 1, 2, 1, 2}, 0.393, 0.436},  {{32, 1, 1, 2, 1, 2}, 0.205, 0.237},
    {{32, 1, 1, 2, 2, 2}, 0.209, 0.241},  {{32, 2, 1}, 0.420, 0.479},
    {{32, 2, 1, 2, 1, 2}, 0.399, 0.443},  {{40, 3, 1}, 0.646, 0.729},
    {{40, 3, 1, 2, 2}, 0.617, 0.735},     {{48, 2, 1}, 0.456, 0.528},
    {{48, 2, 1, 2, 1, 2}, 0.435, 0.492},  {{56, 1, 1, 2, 2, 2}, 0.243, 0.281},
    {{56, 3, 1}, 0.689, 0.767},           {{56, 3, 1, 2, 2}, 0.683, 0.782},
    {{64, 1, 1, 2, 1, 2}, 0.249, 0.283},  {{64, 1, 1, 2, 2, 2}, 0.263, 0.289},
    {{64, 2, 1, 2, 2}, 0.514, 0.579},     {{64, 3, 1}, 0.725, 0.787},
    {{64, 3, 1, 2, 2}, 0.724, 0.825},     {{72, 1, 1, 2, 2, 2}, 0.279, 0.313},
    {{72, 2, 1}, 0.531, 0.569},           {{80, 1, 1, 2, 1, 2}, 0.278, 0.304},
    {{80, 2, 1}, 0.554, 0.599},           {{80, 2, 1, 2, 2}, 0.553, 0.612},
    {{80, 3, 1}, 0.792, 0.851},           {{80, 3, 1, 2, 2}, 0.809, 0.915},
    {{88, 1, 1, 2, 2, 2}, 0.310, 0.336},  {{88, 2, 1}, 0.583, 0.627},
    {{88, 2, 1, 2, 2}, 0.588, 0.644},     {{96, 1, 1, 2, 1, 2}, 0.319, 0.347},
    {{96, 1, 1, 2, 2, 2}, 0.332, 0.353},  {{96, 2, 1}, 0.629, 0.647},
    {{96, 3, 1}, 0.866, 0.943},           {{96, 3, 1, 2, 2}, 0.898, 0.991},
    {{104, 2, 1}, 0.653, 0.671},          {{104, 2, 1, 2, 2}, 0.660, 0.696},
    {{112, 1, 1, 2, 2, 2}, 0.377, 0.389}, {{112, 2, 1}, 0.678, 0.705},
    {{120, 2, 1}, 0.700, 0.725},          {{128, 1, 1, 2, 2}, 0.404, 0.450},
    {{128, 1, 1, 2, 2, 2}, 0.411, 0.426}, {{128, 2, 1, 2, 0}, 0.733, 0.759},
    {{128, 2, 1, 2, 2}, 0.727, 0.768},    {{128, 2, 2}, 0.707, 0.748},
    {{128, 3, 1, 2, 0}, 1.066, 1.105},    {{136, 2, 1}, 0.768, 0.785},
    {{136, 2, 1, 2, 2}, 0.768, 0.799},    {{144, 2, 2}, 0.789, 0.808},
    {{152, 2, 1}, 0.846, 0.836},          {{152, 2, 1, 2, 2}, 0.842, 0.850},
    {{160, 1, 1, 2, 0}, 0.491, 0.522},    {{160, 1, 1, 2, 2}, 0.468, 0.498},
    {{160, 2, 1, 2, 2}, 0.885, 0.892},    {{160, 2, 2}, 0.875, 0.878},
    {{176, 2, 2}, 0.931, 0.900},          {{192, 2, 2}, 1.029, 1.009},
    {{256, 2, 2}, 1.385, 1.368},
};

// What is around the steps, in microseconds. `size`: of a block's tile, 1 for 128 tokens x 64
// features.
constexpr double TileSize(const PersistentTile& tile) { return tile.tokens * tile.groups / 128.0; }

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
// before a part's last, all blocks at once; the same for a group of a part that meets the other in
// a cluster.
inline constexpr double kGoOnUs = 6.0;
inline constexpr double kMeetPartsUs = 0.9;
inline constexpr double kTakeOverPartUs = 0.6;
constexpr double TakeOverChainUs(double size) { return 0.5 * size; }
constexpr double PutDownChainUs(double size) { return 0.2 * size * size; }
inline constexpr double kPutDownChainOfGroupUs = 0.8;

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
    const int put_down = tile.sets == 0 ? tile.groups * (part_chains - 1) : 0;
    return PartsMicroseconds(tile, s.part_steps * step_us) + put_down * kPutDownChainOfGroupUs;
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
