// The tiles of grouped products and what a step of each costs (tile_list.h).
#pragma once

#include "kernels/cuda/sm90a/tile_list.h"

namespace awqd::cuda {

// Their tiles are those of many experts: none is in parts. Costs are those of 4-bit codes.
inline constexpr TileCost kGroupedTiles4[] = {
    {{32, 2, 2}, 0.379, 0.371},  {{64, 2, 2}, 0.479, 0.463},  {{64, 3, 1}, 0.695, 0.658},
    {{80, 3, 1}, 0.752, 0.852},  {{96, 3, 1}, 0.815, 0.931},  {{112, 3, 1}, 0.900, 0.996},
    {{128, 3, 1}, 1.014, 1.047}, {{144, 2, 1}, 0.766, 0.765}, {{160, 2, 2}, 0.819, 0.803},
    {{256, 2, 2}, 1.308, 1.267},
};

}  // namespace awqd::cuda
