// The tiles of 8-bit codes and what a step of each costs (tile_list.h).
#pragma once

#include "kernels/cuda/sm90a/tile_list.h"

namespace awqd::cuda {

// Products of 8-bit codes whose order of sums is free. Records are twice as large, so rings have
// fewer slots. H100, 2026-11-24: fitted to 2075 cases of four layer shapes at 20 counts of tokens
// from 17 to 4096 with activations of both types, 28 tiles. These are the fewest with which no case
// takes more than 2 % longer than with all. Groups of 128 make do with five.
inline constexpr TileCost kFreeTiles8[] = {
    {{32, 1, 1, 2, 1, 2}, 0.339, 0.339, kBare8}, {{32, 2, 2}, 0.748, 0.748, kEvery8},
    {{48, 2, 1, 2}, 0.610, 0.568, kBare8},       {{64, 1, 1, 2, 1, 2}, 0.373, 0.371, kBare8},
    {{64, 2, 1, 2}, 0.646, 0.640, kBare8},       {{64, 2, 2}, 0.752, 0.750, kEvery8},
    {{96, 2, 1, 2}, 0.694, 0.689, kBare8},       {{96, 3, 1}, 1.030, 1.038, kBare8},
    {{128, 1, 1, 2}, 0.420, 0.414, kBare8},      {{128, 2, 1, 2}, 0.757, 0.753, kEvery8},
    {{128, 2, 2}, 0.715, 0.704, kEvery8},        {{160, 2, 1, 2}, 0.843, 0.844, kBare8},
    {{160, 2, 2}, 0.848, 0.828, kBare8},         {{192, 2, 1, 2}, 0.993, 0.979, kBare8},
    {{192, 2, 2}, 0.991, 0.968, kEvery8},
};

}  // namespace awqd::cuda
