// What the persistent product's tiles cost: the measured numbers that tiles.cc chooses by, alone in
// their file.
#pragma once

#include <algorithm>

#include "kernels/cuda/sm90a/schedule.h"
#include "kernels/cuda/sm90a/tiles.h"
#include "kernels/types.h"

namespace awqd::cuda {

// What a tile costs, in microseconds: a step of a block, and all that is not steps (start, sums of
// cut tiles, output) with tiles cut anywhere, cut evenly, and whole; and what is added where a
// tile's sums come from more than three clusters. LaunchTile in qmatmul_a16w4.cuh compiles exactly
// these. H100, 2026-11-22 and 23, fitted to eight layer shapes from 4096 x 4096 to 8192 x 57344 at
// full tiles of tokens, within 10 % up to a millisecond; whole tiles of
// {32, 2, 2} were not timed. Tried as well and never the fastest: NOTES.md.
struct TileCost {
  PersistentTile tile;
  double step_us;
  double cut_us;
  double even_us;
  double whole_us;
  double many_us;
};

// A tile whose parts meet in a cluster.
constexpr TileCost InParts(const PersistentTile& tile, double step_us, double rest_us) {
  return {tile, step_us, 0, 0, rest_us, 0};
}

inline constexpr TileCost kTileCosts[] = {
    InParts({32, 1, 1, 2, 1, 2}, 0.188, 4.2),
    InParts({32, 2, 1, 2, 1, 2}, 0.392, 4.3),
    InParts({32, 3, 1, 2}, 0.500, 4.5),
    {{32, 2, 2}, 0.400, 7.0, 5.8, 3.0, 0.5},
    InParts({64, 1, 1, 2, 1, 2}, 0.231, 4.5),
    InParts({64, 2, 1, 2}, 0.480, 4.0),
    {{64, 3, 1}, 0.705, 7.5, 5.3, 5.0, 2.3},
    {{64, 2, 2}, 0.495, 6.3, 4.5, 3.0, 2.1},
    {{80, 3, 1}, 0.761, 6.8, 7.3, 2.9, 2.4},
    InParts({96, 1, 1, 2}, 0.327, 3.9),
    InParts({96, 1, 1, 2, 1, 2}, 0.291, 5.1),
    InParts({96, 2, 1, 2}, 0.602, 4.1),
    {{96, 2, 1}, 0.618, 7.6, 4.7, 0.7, 2.8},
    {{96, 3, 1}, 0.888, 8.6, 6.9, 1.0, 3.4},
    {{112, 2, 1}, 0.655, 8.4, 6.1, 2.2, 2.3},
    {{112, 3, 1}, 0.953, 7.7, 7.8, 2.9, 3.2},
    InParts({128, 1, 1, 2}, 0.397, 3.7),
    InParts({128, 2, 1, 2}, 0.742, 3.5),
    InParts({128, 3, 1, 2}, 0.888, 8.7),
    {{128, 2, 1}, 0.727, 8.5, 5.6, 1.6, 2.5},
    // 192 features win where steps are many, 8192 x 57344 at 96 tokens 141 us instead of 148, and
    // where they leave no rest, 4096 x 6144 at 512 tokens 36.8 instead of 40.3.
    {{128, 3, 1}, 1.077, 8.7, 7.8, 2.4, 4.0},
    {{144, 2, 1}, 0.785, 8.8, 6.4, 1.6, 2.5},
    {{144, 3, 1}, 1.190, 8.7, 8.9, 3.1, 4.0},
    InParts({160, 1, 1, 2}, 0.458, 3.8),
    InParts({160, 2, 1, 2}, 0.871, 3.9),
    {{160, 2, 1}, 0.877, 9.4, 5.8, 1.7, 2.7},
    {{160, 3, 1}, 1.326, 8.5, 8.2, 3.0, 5.2},
    {{160, 2, 2}, 0.867, 9.4, 6.9, 2.2, 2.0},
    {{176, 2, 2}, 0.965, 8.9, 6.9, 2.1, 2.7},
    {{176, 3, 1}, 1.450, 9.8, 9.5, 3.3, 4.0},
    InParts({192, 1, 1, 2}, 0.523, 3.8),
    InParts({192, 2, 1, 2}, 1.026, 4.4),
    {{192, 2, 1}, 1.043, 10.6, 6.2, 1.2, 3.5},
    {{192, 3, 1}, 1.574, 10.0, 9.1, 3.7, 5.2},
    {{192, 2, 2}, 1.027, 11.0, 7.3, 2.4, 2.9},
    InParts({224, 2, 1, 2}, 1.198, 4.0),
    {{224, 2, 1}, 1.217, 11.5, 6.4, 1.0, 3.6},
    InParts({256, 2, 1, 2}, 1.355, 4.4),
    {{256, 2, 1}, 1.389, 13.6, 7.0, 1.6, 4.7},
    // Two blocks that share tokens win from about a hundred steps on: 4096 x 28672 at 2048 tokens
    // 626 us instead of 646, at 256 tokens 89.3 instead of 90.2.
    {{256, 2, 2}, 1.361, 14.1, 9.0, 3.0, 3.7},
};

// The same for tiles that keep the order of sums. {80, 3, 1}, {112, 2, 1} and {144, 2, 1}
// were computed from those above and their neighbours before they ran, and what they then took
// agreed; {32, 2, 1, 2, 1, 2} has about the cost of the one above; {160, 3, 1, 2, 0} was computed
// from {128, 3, 1, 2, 0}, and not timed.
inline constexpr TileCost kChainedTileCosts[] = {
    InParts({32, 1, 1, 2, 1, 2}, 0.190, 4.1),
    InParts({32, 1, 1, 2, 2, 2}, 0.195, 4.2),
    InParts({32, 2, 1, 2, 1, 2}, 0.392, 4.4),
    InParts({32, 3, 1, 2, 2}, 0.530, 5.0),
    {{32, 2, 1}, 0.431, 7.4, 6.6, 2.5, 0.9},
    InParts({64, 1, 1, 2, 1, 2}, 0.235, 4.5),
    InParts({64, 1, 1, 2, 2, 2}, 0.250, 4.5),
    InParts({64, 2, 1, 2, 2}, 0.491, 4.1),
    InParts({64, 3, 1, 2, 2}, 0.630, 6.0),
    {{64, 2, 1}, 0.517, 8.0, 5.0, 1.5, 2.1},
    {{64, 3, 1}, 0.700, 12.1, 5.9, 3.0, 2.3},
    {{80, 3, 1}, 0.785, 13.0, 7.3, 2.8, 2.3},
    InParts({96, 1, 1, 2, 1, 2}, 0.291, 5.1),
    InParts({96, 1, 1, 2, 2, 2}, 0.313, 5.1),
    InParts({96, 2, 1, 2, 2}, 0.611, 4.5),
    InParts({96, 3, 1, 2, 2}, 0.758, 7.5),
    {{96, 2, 1}, 0.625, 8.7, 5.9, 1.7, 2.4},
    {{96, 3, 1}, 0.870, 15.1, 7.5, 2.6, 2.3},
    {{112, 2, 1}, 0.680, 9.8, 6.3, 2.0, 2.5},
    InParts({128, 1, 1, 2, 2}, 0.420, 4.0),
    InParts({128, 1, 1, 2, 0}, 0.405, 5.2),
    InParts({128, 1, 1, 2, 2, 2}, 0.395, 5.2),
    InParts({128, 2, 1, 2, 2}, 0.729, 4.2),
    InParts({128, 2, 1, 2, 0}, 0.716, 6.0),
    InParts({128, 3, 1, 2, 0}, 0.891, 10.2),
    {{128, 2, 2}, 0.740, 11.5, 6.7, 2.1, 2.6},
    {{144, 2, 1}, 0.810, 11.8, 6.7, 1.6, 2.7},
    InParts({160, 1, 1, 2, 2}, 0.490, 4.1),
    InParts({160, 1, 1, 2, 0}, 0.462, 6.3),
    InParts({160, 2, 1, 2, 2}, 0.882, 4.6),
    InParts({160, 2, 1, 2, 0}, 0.871, 7.0),
    InParts({160, 3, 1, 2, 0}, 1.090, 10.2),
    {{160, 2, 1}, 0.906, 12.8, 7.0, 1.4, 2.8},
    {{160, 2, 2}, 0.893, 12.8, 7.7, 2.1, 2.9},
    {{176, 2, 2}, 0.980, 12.5, 8.8, 2.0, 2.8},
    {{192, 2, 2}, 1.070, 16.4, 15.0, 4.3, 3.8},
    // Where chains are few or long: 28672 x 8192 at 1024 tokens 630 us instead of 690, 8192 x 8192
    // 203 instead of 205.
    {{256, 2, 2}, 1.375, 17.0, 17.0, 6.2, 0.0},
};
// To park a total and read it back.
inline constexpr double kParkUs = 5.5;
// To put down a chain of a group's part.
inline constexpr double kPutDownUs = 0.5;
// To take over more than four chains, of which the table's costs are, through global memory.
inline constexpr double kManyChainsUs = 3.5;

// Of the product that is cut so into tiles of this kind, with FP16 activations.
inline double Microseconds(const Schedule& s, const TileCost& cost) {
  if (cost.tile.parts > 1) return s.part_steps * cost.step_us + cost.whole_us;
  if (s.split == 0) return s.rounds * s.k_blocks * cost.step_us + cost.whole_us;
  const double steps = static_cast<double>(s.tiles()) * s.k_blocks / s.clusters;
  const double rest = s.clusters % s.split == 0 ? cost.even_us : cost.cut_us;
  return steps * cost.step_us + rest + (s.clusters > 3 * s.split ? cost.many_us : 0);
}

// Decoding to BF16 takes longer, and where the tensor cores are the limit its products draw less
// power: 1.05 to 1.18 times as long with tiles of 32 and 64 tokens, 1.04 to 1.08 with 96, 1.01 to
// 1.04 with 128, 0.98 to 1 with 256.
inline double DTypeFactor(const PersistentTile& tile, DType x) {
  if (x != DType::kBf16) return 1;
  return std::max(0.98, 1.09 - 0.07 * std::max(0, tile.tokens - 64) / 64);
}

}  // namespace awqd::cuda
