// The tiles of INT8 activations and what a step of each costs (tile_list.h).
#pragma once

#include "kernels/cuda/sm90a/tile_list.h"

namespace awqd::cuda {

inline constexpr uint32_t kOfInt8 = kOneMeta | kEvery8;

// Sums are kept twice, as integers and in FP32, so tiles have at most 128 tokens and two consumers.
// Where a column has one scale, integers alone would do, and 192 and 256 tokens fit: {192, 2, 2}
// and {256, 2, 2} took 0.96 to 1.3 times as long at 256 to 4096 tokens (H100, 2026-11-25).
inline constexpr TileCost kFreeTilesInt8[] = {
    {{64, 1, 1, 2}, 0.190, 0.190, kOfInt8},  {{64, 2, 2}, 0.260, 0.260, kOfInt8},
    {{64, 2, 1, 2}, 0.280, 0.280, kOfInt8},  {{128, 1, 1, 2}, 0.280, 0.280, kOfInt8},
    {{128, 2, 1, 2}, 0.440, 0.440, kOfInt8}, {{128, 2, 2}, 0.440, 0.440, kOfInt8},
};

}  // namespace awqd::cuda
