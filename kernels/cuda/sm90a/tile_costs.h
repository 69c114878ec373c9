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
// these. H100, 2026-11-22, fitted to eight layer shapes from 4096 x 4096 to 8192 x 57344 at 17 ..
// 4096 tokens, within 10 % up to a millisecond. Tried as well and never the fastest: NOTES.md.
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
    {{32, 2, 1, 2}, 0.490, 5.1, 4.6, 5.1, 0.5},
    {{32, 3, 1, 2}, 0.640, 6.5, 6.5, 6.5, 1.0},
    InParts({32, 1, 1, 2, 2}, 0.280, 3.6),
    InParts({32, 2, 1, 2, 2}, 0.397, 4.3),
    InParts({32, 3, 1, 2, 2}, 0.506, 6.1),
    {{64, 2, 1, 1}, 0.545, 7.0, 6.0, 5.0, 0.7},
    {{64, 3, 1, 1}, 0.755, 8.3, 6.5, 5.0, 2.0},
    InParts({64, 1, 1, 1, 2}, 0.306, 4.0),
    InParts({64, 2, 1, 1, 2}, 0.499, 3.8),
    InParts({64, 3, 1, 1, 2}, 0.623, 6.0),
    {{96, 2, 1, 1}, 0.636, 6.6, 5.0, 0.7, 2.5},
    {{96, 3, 1, 1}, 0.923, 8.6, 7.1, 1.0, 3.5},
    InParts({96, 1, 1, 1, 2}, 0.345, 4.2),
    InParts({96, 2, 1, 1, 2}, 0.564, 4.0),
    {{128, 2, 1, 1}, 0.755, 8.6, 7.8, 2.2, 1.0},
    // 192 features win where steps are many, 8192 x 57344 at 96 tokens 165 us instead of 182, and
    // where they leave no rest, 4096 x 6144 at 512 tokens 40.0 instead of 41.8.
    {{128, 3, 1, 1}, 1.110, 9.0, 9.0, 4.4, 3.0},
    InParts({128, 1, 1, 1, 2}, 0.409, 3.9),
    InParts({128, 2, 1, 1, 2}, 0.714, 3.8),
    InParts({128, 3, 1, 1, 2}, 0.862, 9.4),
    {{160, 2, 1, 1}, 0.912, 8.7, 5.8, 0.6, 2.7},
    {{160, 3, 1, 1}, 1.364, 8.9, 8.7, 2.9, 4.7},
    {{160, 2, 2, 1}, 0.898, 8.8, 6.4, 1.7, 2.4},
    InParts({160, 1, 1, 1, 2}, 0.489, 3.5),
    InParts({160, 2, 1, 1, 2}, 0.833, 4.4),
    {{176, 2, 2, 1}, 0.972, 9.2, 7.2, 1.4, 2.7},
    {{192, 2, 1, 1}, 1.087, 9.4, 6.4, 0.0, 3.5},
    {{192, 3, 1, 1}, 1.575, 20.0, 11.0, 0.0, 5.2},
    {{192, 2, 2, 1}, 1.070, 9.8, 7.6, 1.3, 2.9},
    InParts({192, 1, 1, 1, 2}, 0.546, 3.7),
    InParts({192, 2, 1, 1, 2}, 0.987, 5.0),
    {{224, 2, 1, 1}, 1.201, 11.6, 7.8, 0.3, 3.1},
    InParts({224, 2, 1, 1, 2}, 1.105, 5.4),
    {{256, 2, 1, 1}, 1.385, 13.6, 11.5, 6.0, 2.8},
    // Two blocks that share tokens win from about a hundred steps on: 4096 x 28672 at 2048 tokens
    // 631 us instead of 648, at 256 tokens 91.0 instead of 90.4.
    {{256, 2, 2, 1}, 1.375, 14.4, 11.5, 6.2, 2.8},
    InParts({256, 2, 1, 1, 2}, 1.326, 5.4),
};

// The same for tiles that keep the order of sums.
inline constexpr TileCost kChainedTileCosts[] = {
    {{32, 2, 1, 1}, 0.455, 9.8, 6.5, 2.5, 1.0},
    {{32, 3, 1, 1}, 0.600, 12.0, 6.5, 3.0, 1.0},
    InParts({32, 1, 1, 1, 2, 2}, 0.270, 3.9),
    InParts({32, 1, 1, 1, 2, 4}, 0.270, 4.4),
    InParts({32, 2, 1, 1, 2, 2}, 0.490, 2.3),
    InParts({32, 3, 1, 1, 2, 2}, 0.506, 6.5),
    {{64, 2, 1, 1}, 0.550, 9.0, 6.0, 1.5, 1.5},
    {{64, 3, 1, 1}, 0.760, 11.0, 6.5, 3.0, 2.5},
    InParts({64, 1, 1, 1, 2, 2}, 0.306, 4.4),
    InParts({64, 1, 1, 1, 2, 4}, 0.306, 5.0),
    InParts({64, 2, 1, 1, 2, 2}, 0.503, 4.3),
    InParts({64, 3, 1, 1, 2, 2}, 0.630, 7.2),
    {{96, 2, 1, 1}, 0.675, 8.1, 5.8, 1.6, 2.3},
    {{96, 3, 1, 1}, 0.914, 14.1, 8.6, 2.7, 1.9},
    InParts({96, 2, 1, 1, 2, 2}, 0.626, 4.1),
    InParts({96, 3, 1, 1, 2, 2}, 0.757, 6.8),
    {{128, 2, 1, 1}, 0.820, 11.0, 7.5, 2.5, 1.0},
    {{128, 2, 2, 1}, 0.800, 14.0, 8.5, 4.5, 1.0},
    InParts({128, 1, 1, 1, 2, 2}, 0.460, 5.0),
    InParts({128, 2, 1, 1, 2, 2}, 0.725, 5.0),
    {{160, 2, 1, 1}, 0.895, 12.4, 8.3, 2.3, 2.8},
    {{160, 2, 2, 1}, 0.890, 12.0, 9.5, 3.0, 2.8},
    InParts({160, 1, 1, 1, 2, 2}, 0.530, 4.4),
    InParts({160, 2, 1, 1, 2, 2}, 0.859, 5.5),
    {{176, 2, 2, 1}, 0.988, 13.0, 9.5, 1.5, 2.8},
    {{192, 2, 2, 1}, 1.130, 17.6, 15.0, 3.9, 3.8},
    // Where chains are few or long: 28672 x 8192 at 1024 tokens 631 us instead of 690, 8192 x 8192
    // 204 instead of 205.
    {{256, 2, 2, 1}, 1.375, 17.0, 17.0, 6.2, 0.0},
};
// To park a total and read it back.
inline constexpr double kParkUs = 5.5;

// Of the product that is cut so into tiles of this kind, with FP16 activations.
inline double Microseconds(const Schedule& s, const TileCost& cost) {
  if (cost.tile.parts > 1) return s.part_steps * cost.step_us + cost.whole_us;
  if (s.split == 0) return s.rounds * s.k_blocks * cost.step_us + cost.whole_us;
  const double steps = static_cast<double>(s.tiles()) * s.k_blocks / s.clusters;
  const double rest = s.clusters % s.split == 0 ? cost.even_us : cost.cut_us;
  return steps * cost.step_us + rest + (s.clusters > 3 * s.split ? cost.many_us : 0);
}

// Decoding to BF16 takes longer, and where the tensor cores are the limit its products draw less
// power: 4096 x 4096 at 64 tokens 10.0 us instead of 8.6, at 512 29.0 instead of 26.1 with tiles of
// 128 tokens and 26.9 instead of 27.3 with 256. Between, 4096 x 28672 takes 1.12 times as long with
// tiles of 96, 1.06 with 160, 1.02 with 192 and 0.99 with 224.
inline double DTypeFactor(const PersistentTile& tile, DType x) {
  if (x != DType::kBf16) return 1;
  return 1.17 - 0.19 * std::max(0, tile.tokens - 64) / 192;
}

}  // namespace awqd::cuda
