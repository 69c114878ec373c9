// The tiles that are compiled, and what a step of each costs: the one list that kernels are made
// from and that tiles.cc chooses from.
//
// Microseconds on an H100, 2026-11-23: fitted to 5201 cases with activations of both types, one to
// four tiles of tokens of eight layer shapes from 4096 x 4096 to 8192 x 57344
// (tests/bench/tile_costs.py), 2.7 % off (root mean square). Of the 134 tiles that were timed
// these are left. Without any of the others no count of tokens of tests/gpu/bench.sh becomes
// slower, and none of its --sweep by more than 7 %, 0.7 % on average; NOTES.md, version 40.
#pragma once

#include <cstdint>

#include "kernels/cuda/sm90a/tiles.h"

namespace awqd::cuda {

struct TileCost {
  PersistentTile tile;
  // A step, 128 of K, while no multiprocessor is idle, with activations of either type. Decoding to
  // BF16 takes longer; where the tensor cores are the limit its products draw less power.
  double fp16_us;
  double bf16_us;
  // The kinds of records that it is compiled for, bits of RecordKind. Groups of 128 and more, which
  // nearly all weights have, get every tile; the others make do with few.
  uint32_t kinds = kOneMeta;
};

inline constexpr uint32_t kEvery = kOneMeta | kTwoMetas | kFineMetas;

// Products that are free in the order of their sums.
inline constexpr TileCost kFreeTiles4[] = {
    {{32, 1, 1, 2, 1, 2}, 0.197, 0.236, kEvery},
    {{32, 2, 1, 2, 1, 2}, 0.395, 0.443, kEvery},
    {{32, 2, 2}, 0.429, 0.481, kEvery},
    {{40, 3, 1, 2}, 0.573, 0.693},
    {{48, 1, 1, 2, 1, 2}, 0.215, 0.256},
    {{48, 2, 1, 2}, 0.415, 0.515},
    {{56, 3, 1}, 0.677, 0.753},
    {{64, 1, 1, 2, 1, 2}, 0.238, 0.273, kEvery},
    {{64, 2, 1, 2}, 0.469, 0.545, kEvery},
    {{64, 2, 2}, 0.479, 0.543},
    {{64, 3, 1}, 0.695, 0.791, kEvery},
    {{80, 1, 1, 2, 1, 2}, 0.269, 0.301},
    {{80, 3, 1}, 0.752, 0.852},
    {{88, 2, 1, 2}, 0.537, 0.623},
    {{88, 3, 1}, 0.784, 0.892},
    {{96, 1, 1, 2, 1, 2}, 0.299, 0.327},
    {{96, 3, 1}, 0.815, 0.931},
    {{104, 2, 1}, 0.598, 0.657, kEvery},
    {{112, 1, 1, 2}, 0.332, 0.365},
    {{112, 2, 1, 2}, 0.609, 0.652},
    {{112, 3, 1}, 0.900, 0.996},
    {{112, 3, 1, 2}, 0.883, 0.985},
    {{120, 2, 1}, 0.643, 0.685},
    {{128, 1, 1, 2}, 0.359, 0.385, kEvery},
    {{128, 2, 1}, 0.696, 0.737},
    {{128, 2, 1, 2}, 0.664, 0.701, kEvery},
    {{128, 3, 1}, 1.014, 1.047, kEvery},
    {{128, 3, 1, 2}, 1.023, 1.056},
    {{136, 3, 1}, 1.077, 1.094},
    {{144, 2, 1}, 0.766, 0.765, kEvery},
    {{144, 2, 1, 2}, 0.737, 0.745},
    {{152, 3, 1}, 1.181, 1.166},
    {{160, 1, 1, 2}, 0.402, 0.427, kEvery},
    {{160, 2, 1, 2}, 0.800, 0.790},
    {{160, 2, 2}, 0.819, 0.803},
    {{160, 3, 1}, 1.241, 1.226},
    {{176, 1, 1, 2}, 0.433, 0.455},
    {{176, 2, 1, 2}, 0.886, 0.867},
    {{176, 2, 2}, 0.898, 0.880, kEvery},
    {{176, 3, 1}, 1.363, 1.338},
    {{192, 2, 1, 2}, 0.966, 0.947},
    {{192, 2, 2}, 0.980, 0.958},
    {{192, 3, 1}, 1.496, 1.466},
    {{208, 1, 1, 2}, 0.518, 0.509, kEvery},
    {{208, 2, 1, 2}, 1.032, 1.019},
    {{208, 2, 2}, 1.059, 1.032, kEvery},
    {{224, 2, 1, 2}, 1.130, 1.105},
    {{224, 2, 2}, 1.144, 1.113},
    {{256, 1, 1, 2}, 0.653, 0.648},
    {{256, 2, 1, 2}, 1.300, 1.268},
    {{256, 2, 2}, 1.308, 1.267, kEvery},
};

// The same for products that keep it.
inline constexpr TileCost kChainedTiles4[] = {
    {{32, 1, 1, 2, 1, 2}, 0.205, 0.237, kEvery},
    {{32, 1, 1, 2, 2, 2}, 0.203, 0.241, kEvery},
    {{32, 2, 1}, 0.464, 0.479},
    {{32, 2, 1, 2, 1, 2}, 0.372, 0.443, kEvery},
    {{40, 3, 1}, 0.655, 0.729, kEvery},
    {{40, 3, 1, 2, 2}, 0.617, 0.735},
    {{48, 2, 1, 2, 1, 2}, 0.433, 0.492},
    {{56, 3, 1}, 0.683, 0.767},
    {{64, 1, 1, 2, 1, 2}, 0.253, 0.297, kEvery},
    {{64, 1, 1, 2, 2, 2}, 0.261, 0.297, kEvery},
    {{64, 2, 1, 2, 2}, 0.492, 0.574, kEvery},
    {{64, 3, 1}, 0.722, 0.801, kEvery},
    {{64, 3, 1, 2, 2}, 0.718, 0.848},
    {{72, 1, 1, 2, 2, 2}, 0.278, 0.313},
    {{80, 1, 1, 2, 1, 2}, 0.285, 0.327},
    {{80, 2, 1, 2, 2}, 0.548, 0.616},
    {{80, 3, 1}, 0.771, 0.852},
    {{88, 2, 1}, 0.554, 0.597, kEvery},
    {{88, 2, 1, 2, 2}, 0.581, 0.646},
    {{96, 1, 1, 2, 1, 2}, 0.327, 0.365},
    {{96, 1, 1, 2, 2, 2}, 0.324, 0.349, kEvery},
    {{96, 2, 1}, 0.609, 0.628},
    {{96, 3, 1}, 0.852, 0.935},
    {{104, 2, 1}, 0.623, 0.665, kEvery},
    {{104, 2, 1, 2, 2}, 0.634, 0.685},
    {{112, 1, 1, 2, 2, 2}, 0.380, 0.379},
    {{120, 2, 1}, 0.680, 0.722},
    {{128, 1, 1, 2, 2}, 0.409, 0.450, kEvery},
    {{128, 1, 1, 2, 2, 2}, 0.407, 0.421, kEvery},
    {{128, 2, 1, 2, 0}, 0.712, 0.742},
    {{128, 2, 1, 2, 2}, 0.722, 0.776, kEvery},
    {{128, 2, 2}, 0.702, 0.736, kEvery},
    {{128, 3, 1, 2, 0}, 1.051, 1.109},
    {{136, 2, 1}, 0.745, 0.766, kEvery},
    {{136, 2, 1, 2, 2}, 0.752, 0.797},
    {{152, 2, 1}, 0.825, 0.831},
    {{160, 1, 1, 2, 0}, 0.465, 0.506, kEvery},
    {{160, 1, 1, 2, 2}, 0.457, 0.503},
    {{160, 2, 1, 2, 2}, 0.865, 0.868},
    {{160, 2, 2}, 0.856, 0.857, kEvery},
    {{176, 2, 2}, 0.930, 0.915},
    {{192, 2, 2}, 1.030, 1.022, kEvery},
    {{256, 2, 2}, 1.398, 1.385},
};

}  // namespace awqd::cuda
