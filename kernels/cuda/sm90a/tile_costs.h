// What the persistent product's tiles cost: the measured numbers that tiles.cc chooses by, alone in
// their file.
//
// A call takes the steps of its clusters, which depend on the tile, and what is around them, which
// depends on how large tiles are and how they are cut. H100, 2026-11-23. What is around the steps
// is fitted to 2359 cases with FP16 together, 227 tiles at one to four tiles of tokens of eight
// layer shapes from 4096 x 4096 to 8192 x 57344. Then the steps of each tile to its own cases
// (tests/bench/tile_costs.py), last to 5201 of both types; that is off by 2.7 % (root mean square),
// and what is chosen takes 0.2 % longer than the fastest that is compiled, on average. Steps of
// {32, 2, 2} and {48, 2, 2} are older, as their loop is (consumer.cuh), and those of tiles of 24
// tokens with BF16 or the order of sums are of that loop too. NOTES.md has what was left out.
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

// Of kFreeTiles in compiled_tiles.h, in their order.
inline constexpr TileCost kTileCosts[] = {
    {{24, 1, 1, 2, 1, 2}, 0.192, 0.227}, {{24, 2, 1, 2}, 0.402, 0.466},
    {{32, 1, 1, 2, 1, 2}, 0.197, 0.236}, {{32, 2, 1, 2, 1, 2}, 0.395, 0.443},
    {{32, 2, 2}, 0.429, 0.481},          {{40, 2, 1, 2}, 0.420, 0.513},
    {{40, 3, 1, 2}, 0.573, 0.693},       {{48, 1, 1, 2, 1, 2}, 0.215, 0.256},
    {{48, 2, 1, 2}, 0.415, 0.515},       {{48, 2, 2}, 0.454, 0.510},
    {{48, 3, 1}, 0.661, 0.731},          {{56, 2, 1, 2}, 0.437, 0.532},
    {{56, 3, 1}, 0.677, 0.753},          {{56, 3, 1, 2}, 0.644, 0.750},
    {{64, 1, 1, 2, 1, 2}, 0.238, 0.273}, {{64, 2, 1, 2}, 0.469, 0.545},
    {{64, 2, 2}, 0.479, 0.543},          {{64, 3, 1}, 0.695, 0.791},
    {{72, 3, 1}, 0.740, 0.827},          {{80, 1, 1, 2, 1, 2}, 0.269, 0.301},
    {{80, 2, 1, 2}, 0.518, 0.592},       {{80, 3, 1}, 0.752, 0.852},
    {{88, 2, 1}, 0.546, 0.632},          {{88, 2, 1, 2}, 0.537, 0.623},
    {{88, 3, 1}, 0.784, 0.892},          {{96, 1, 1, 2, 1, 2}, 0.299, 0.327},
    {{96, 3, 1}, 0.815, 0.931},          {{96, 3, 1, 2}, 0.821, 0.905},
    {{104, 1, 1, 2}, 0.322, 0.360},      {{104, 2, 1}, 0.598, 0.657},
    {{104, 2, 1, 2}, 0.584, 0.639},      {{104, 3, 1}, 0.846, 0.960},
    {{112, 1, 1, 2}, 0.332, 0.365},      {{112, 2, 1, 2}, 0.609, 0.652},
    {{112, 3, 1}, 0.900, 0.996},         {{112, 3, 1, 2}, 0.883, 0.985},
    {{120, 2, 1}, 0.643, 0.685},         {{120, 3, 1}, 0.957, 1.023},
    {{128, 1, 1, 2}, 0.359, 0.385},      {{128, 2, 1}, 0.696, 0.737},
    {{128, 2, 1, 2}, 0.664, 0.701},      {{128, 3, 1}, 1.014, 1.047},
    {{128, 3, 1, 2}, 1.023, 1.056},      {{136, 2, 1}, 0.728, 0.758},
    {{136, 3, 1}, 1.077, 1.094},         {{144, 1, 1, 2}, 0.376, 0.401},
    {{144, 2, 1}, 0.766, 0.765},         {{144, 2, 1, 2}, 0.737, 0.745},
    {{144, 3, 1}, 1.143, 1.134},         {{152, 2, 1}, 0.804, 0.786},
    {{152, 3, 1}, 1.181, 1.166},         {{160, 1, 1, 2}, 0.402, 0.427},
    {{160, 2, 1}, 0.842, 0.832},         {{160, 2, 1, 2}, 0.800, 0.790},
    {{160, 2, 2}, 0.819, 0.803},         {{160, 3, 1}, 1.241, 1.226},
    {{176, 1, 1, 2}, 0.433, 0.455},      {{176, 2, 1}, 0.919, 0.901},
    {{176, 2, 1, 2}, 0.886, 0.867},      {{176, 2, 2}, 0.898, 0.880},
    {{176, 3, 1}, 1.363, 1.338},         {{192, 1, 1, 2}, 0.481, 0.479},
    {{192, 2, 1}, 0.999, 0.979},         {{192, 2, 1, 2}, 0.966, 0.947},
    {{192, 2, 2}, 0.980, 0.958},         {{192, 3, 1}, 1.496, 1.466},
    {{208, 1, 1, 2}, 0.518, 0.509},      {{208, 2, 1, 2}, 1.032, 1.019},
    {{208, 2, 2}, 1.059, 1.032},         {{224, 2, 1, 2}, 1.130, 1.105},
    {{224, 2, 2}, 1.144, 1.113},         {{240, 2, 2}, 1.217, 1.185},
    {{256, 1, 1, 2}, 0.653, 0.648},      {{256, 2, 1, 2}, 1.300, 1.268},
    {{256, 2, 2}, 1.308, 1.267},
};

// Of kChainedTiles.
inline constexpr TileCost kChainedTileCosts[] = {
    {{24, 1, 1, 2, 1, 2}, 0.201, 0.234},  {{24, 1, 1, 2, 2, 2}, 0.200, 0.230},
    {{24, 2, 1, 2, 1, 2}, 0.393, 0.436},  {{32, 1, 1, 2, 1, 2}, 0.205, 0.237},
    {{32, 1, 1, 2, 2, 2}, 0.203, 0.241},  {{32, 2, 1}, 0.464, 0.479},
    {{32, 2, 1, 2, 1, 2}, 0.372, 0.443},  {{40, 3, 1}, 0.655, 0.729},
    {{40, 3, 1, 2, 2}, 0.617, 0.735},     {{48, 2, 1}, 0.496, 0.528},
    {{48, 2, 1, 2, 1, 2}, 0.433, 0.492},  {{56, 1, 1, 2, 2, 2}, 0.244, 0.281},
    {{56, 3, 1}, 0.683, 0.767},           {{56, 3, 1, 2, 2}, 0.675, 0.782},
    {{64, 1, 1, 2, 1, 2}, 0.253, 0.297},  {{64, 1, 1, 2, 2, 2}, 0.261, 0.297},
    {{64, 2, 1, 2, 2}, 0.492, 0.574},     {{64, 3, 1}, 0.722, 0.801},
    {{64, 3, 1, 2, 2}, 0.718, 0.848},     {{72, 1, 1, 2, 2, 2}, 0.278, 0.313},
    {{72, 2, 1}, 0.518, 0.574},           {{80, 1, 1, 2, 1, 2}, 0.285, 0.327},
    {{80, 2, 1}, 0.537, 0.583},           {{80, 2, 1, 2, 2}, 0.548, 0.616},
    {{80, 3, 1}, 0.771, 0.852},           {{80, 3, 1, 2, 2}, 0.822, 0.908},
    {{88, 1, 1, 2, 2, 2}, 0.308, 0.332},  {{88, 2, 1}, 0.554, 0.597},
    {{88, 2, 1, 2, 2}, 0.581, 0.646},     {{96, 1, 1, 2, 1, 2}, 0.327, 0.365},
    {{96, 1, 1, 2, 2, 2}, 0.324, 0.349},  {{96, 2, 1}, 0.609, 0.628},
    {{96, 3, 1}, 0.852, 0.935},           {{96, 3, 1, 2, 2}, 0.882, 0.967},
    {{104, 2, 1}, 0.623, 0.665},          {{104, 2, 1, 2, 2}, 0.634, 0.685},
    {{112, 1, 1, 2, 2, 2}, 0.380, 0.379}, {{112, 2, 1}, 0.647, 0.699},
    {{120, 2, 1}, 0.680, 0.722},          {{128, 1, 1, 2, 2}, 0.409, 0.450},
    {{128, 1, 1, 2, 2, 2}, 0.407, 0.421}, {{128, 2, 1, 2, 0}, 0.712, 0.742},
    {{128, 2, 1, 2, 2}, 0.722, 0.776},    {{128, 2, 2}, 0.702, 0.736},
    {{128, 3, 1, 2, 0}, 1.051, 1.109},    {{136, 2, 1}, 0.745, 0.766},
    {{136, 2, 1, 2, 2}, 0.752, 0.797},    {{144, 2, 2}, 0.771, 0.804},
    {{152, 2, 1}, 0.825, 0.831},          {{152, 2, 1, 2, 2}, 0.825, 0.813},
    {{160, 1, 1, 2, 0}, 0.465, 0.506},    {{160, 1, 1, 2, 2}, 0.457, 0.503},
    {{160, 2, 1, 2, 2}, 0.865, 0.868},    {{160, 2, 2}, 0.856, 0.857},
    {{176, 2, 2}, 0.930, 0.915},          {{192, 2, 2}, 1.030, 1.022},
    {{256, 2, 2}, 1.398, 1.385},
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
