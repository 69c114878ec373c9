// The tiles that are compiled, and the cost of a step of each. Kernels are instantiated from these
// lists, and tiles.cc chooses from them.
//
// Costs are microseconds on an H100. tests/bench/tile_costs.py fits them to timings of
// awqd_bench --tiles.
#pragma once

#include <cstdint>

#include "kernels/cuda/sm90a/tiles.h"

namespace awqd::cuda {

// The kinds of records that a tile is compiled for.
enum Served {
  kMainKind,  // the kind that nearly all weights of the list have
  kCommon,    // also the others of 4 bits, and E2M1
  kEvery,     // also all others
};

struct TileCost {
  PersistentTile tile;
  // Microseconds of a step, 128 of K, while no multiprocessor is idle. BF16 takes longer where
  // decoding is the limit, and less time where the tensor cores are: they draw less power.
  double fp16_us;
  double bf16_us;
  Served served = kMainKind;
};

constexpr bool IsMain(const RecordKind& kind) {
  return kind == Integers(4, 1) || kind == Integers(8, 0);
}
constexpr bool Serves(const TileCost& listed, const RecordKind& kind, DType x) {
  const PersistentTile& tile = listed.tile;
  // The ring has three slots for each slice at least, but two for real zeros and tables beside 256
  // tokens: without that tile 256 tokens of 4096 x 28672 take 1.24 to 1.37 times cuBLASLt's time
  // instead of 1.04 to 1.16 (H200, 2026-11-29).
  const bool large = kind.real_zeros || kind.code == CodeKind::kTable;
  const int slots = RingSlots(tile, kind, x) / tile.slices;
  if (slots < (large && tile.tokens == 256 ? 2 : 3)) return false;
  const bool common =
      kind == Integers(4, 2) || kind == Integers(4, 8) || kind.code == CodeKind::kE2m1;
  return listed.served >= (IsMain(kind) ? kMainKind : common ? kCommon : kEvery);
}

// Each entry: {tokens, records, cluster, splits, accumulators, slices}, then the costs and the
// kinds.

// ---- 4-bit codes --------------------------------------------------------------------------------
// H100, 2026-11-23. The costs were fitted to 5201 timings: both types of activations, one to four
// tiles of tokens, eight layer shapes from 4096 x 4096 to 8192 x 57344. The fit is 2.7 % off (root
// mean square).
//
// 134 tiles were timed; the list has those that are worth compiling. Without the others no token
// count of tests/gpu/bench.sh becomes slower. Of the counts of its --sweep none becomes slower by
// more than 7 %; the mean is 0.7 %. The costs of tiles of one record that are not in parts are from
// 78 later timings.
//
// Where scales multiply sums (persistent.cuh, ScalesSums), the costs were fitted to timings on an
// H200, 2026-11-27, which computes as fast as an H100 and reads faster: of wider tiles the fit is
// 1 % off there. An H100 cannot read as fast as tiles of 32 tokens compute, by up to a tenth; no
// other tile is faster there. The costs are those of groups of 128 and more; of the others the same
// tiles take up to a fifth longer.

// Products whose order of sums is free.
inline constexpr TileCost kFreeTiles4[] = {
    {{16, 3, 1}, 0.438, 0.438},
    {{32, 1, 1, 2, 1, 2}, 0.171, 0.167, kCommon},
    {{32, 2, 1, 2, 1, 2}, 0.331, 0.332, kEvery},
    {{32, 2, 2}, 0.379, 0.371, kEvery},
    {{40, 3, 1, 2}, 0.548, 0.568},
    {{48, 1, 1, 2, 1, 2}, 0.204, 0.199},
    {{48, 2, 1, 2}, 0.396, 0.386},
    {{56, 3, 1}, 0.649, 0.614},
    {{64, 1, 1, 2, 1, 2}, 0.238, 0.233, kCommon},
    {{64, 2, 1, 2}, 0.469, 0.444, kEvery},
    {{64, 2, 2}, 0.479, 0.463},
    {{64, 3, 1}, 0.695, 0.658, kEvery},
    {{80, 1, 1, 2, 1, 2}, 0.269, 0.256},
    {{80, 3, 1}, 0.752, 0.852},
    {{88, 2, 1, 2}, 0.537, 0.528},
    {{88, 3, 1}, 0.784, 0.892},
    {{96, 1, 1, 2, 1, 2}, 0.299, 0.300},
    {{96, 3, 1}, 0.815, 0.931},
    {{104, 2, 1}, 0.598, 0.601, kCommon},
    {{112, 1, 1, 2}, 0.332, 0.365},
    {{112, 2, 1, 2}, 0.609, 0.652},
    {{112, 3, 1}, 0.900, 0.996},
    {{112, 3, 1, 2}, 0.883, 0.985},
    {{120, 2, 1}, 0.643, 0.685},
    {{128, 1, 1}, 0.395, 0.425},
    {{128, 1, 1, 2}, 0.359, 0.385, kEvery},
    {{128, 2, 1}, 0.696, 0.737},
    {{128, 2, 1, 2}, 0.664, 0.701, kEvery},
    {{128, 3, 1}, 1.014, 1.047, kCommon},
    {{128, 3, 1, 2}, 1.023, 1.056},
    {{136, 3, 1}, 1.077, 1.094},
    {{144, 2, 1}, 0.766, 0.765, kCommon},
    {{144, 2, 1, 2}, 0.737, 0.745},
    {{152, 3, 1}, 1.181, 1.166},
    {{160, 1, 1}, 0.460, 0.490},
    {{160, 1, 1, 2}, 0.402, 0.427, kCommon},
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
    {{208, 1, 1}, 0.550, 0.565},
    {{208, 1, 1, 2}, 0.518, 0.509, kCommon},
    {{208, 2, 1, 2}, 1.032, 1.019},
    {{208, 2, 2}, 1.059, 1.032, kEvery},
    {{224, 2, 1, 2}, 1.130, 1.105},
    {{224, 2, 2}, 1.144, 1.113},
    {{256, 1, 1}, 0.680, 0.680},
    {{256, 1, 1, 2}, 0.653, 0.648},
    {{256, 2, 1, 2}, 1.300, 1.268},
    {{256, 2, 2}, 1.308, 1.267, kEvery},
};

// Products that keep the order of sums.
inline constexpr TileCost kFixedOrderTiles4[] = {
    {{32, 1, 1, 2, 1, 2}, 0.205, 0.237, kCommon},
    {{32, 1, 1, 2, 2, 2}, 0.203, 0.241, kCommon},
    {{32, 2, 1}, 0.464, 0.479},
    {{32, 2, 1, 2, 1, 2}, 0.372, 0.443, kCommon},
    {{40, 3, 1}, 0.655, 0.729, kCommon},
    {{40, 3, 1, 2, 2}, 0.617, 0.735},
    {{48, 2, 1, 2, 1, 2}, 0.433, 0.492},
    {{56, 3, 1}, 0.683, 0.767},
    {{64, 1, 1, 2, 1, 2}, 0.253, 0.297, kCommon},
    {{64, 1, 1, 2, 2, 2}, 0.261, 0.297, kCommon},
    {{64, 2, 1, 2, 2}, 0.492, 0.574, kCommon},
    {{64, 3, 1}, 0.722, 0.801, kCommon},
    {{64, 3, 1, 2, 2}, 0.718, 0.848},
    {{72, 1, 1, 2, 2, 2}, 0.278, 0.313},
    {{80, 1, 1, 2, 1, 2}, 0.285, 0.327},
    {{80, 2, 1, 2, 2}, 0.548, 0.616},
    {{80, 3, 1}, 0.771, 0.852},
    {{88, 2, 1}, 0.554, 0.597, kCommon},
    {{88, 2, 1, 2, 2}, 0.581, 0.646},
    {{96, 1, 1, 2, 1, 2}, 0.327, 0.365},
    {{96, 1, 1, 2, 2, 2}, 0.324, 0.349, kCommon},
    {{96, 2, 1}, 0.609, 0.628},
    {{96, 3, 1}, 0.852, 0.935},
    {{104, 2, 1}, 0.623, 0.665, kCommon},
    {{104, 2, 1, 2, 2}, 0.634, 0.685},
    {{112, 1, 1, 2, 2, 2}, 0.380, 0.379},
    {{120, 2, 1}, 0.680, 0.722},
    {{128, 1, 1, 2, 2}, 0.409, 0.450, kCommon},
    {{128, 1, 1, 2, 2, 2}, 0.407, 0.421, kCommon},
    {{128, 2, 1, 2, 0}, 0.712, 0.742},
    {{128, 2, 1, 2, 2}, 0.722, 0.776, kCommon},
    {{128, 2, 2}, 0.702, 0.736, kCommon},
    {{128, 3, 1, 2, 0}, 1.051, 1.109},
    {{136, 2, 1}, 0.745, 0.766, kCommon},
    {{136, 2, 1, 2, 2}, 0.752, 0.797},
    {{152, 2, 1}, 0.825, 0.831},
    {{160, 1, 1, 2, 0}, 0.465, 0.506, kCommon},
    {{160, 1, 1, 2, 2}, 0.457, 0.503},
    {{160, 2, 1, 2, 2}, 0.865, 0.868},
    {{160, 2, 2}, 0.856, 0.857, kCommon},
    {{176, 2, 2}, 0.930, 0.915},
    {{192, 2, 2}, 1.030, 1.022, kCommon},
    {{256, 2, 2}, 1.398, 1.385},
};

// ---- Grouped products ---------------------------------------------------------------------------

// The tiles belong to many experts, so none is split along K. Costs are those of 4-bit codes.
inline constexpr TileCost kExpertTiles[] = {
    {{16, 3, 1}, 0.438, 0.438},  {{32, 2, 2}, 0.379, 0.371, kEvery},
    {{32, 3, 1}, 0.520, 0.500},  {{64, 2, 2}, 0.479, 0.463, kEvery},
    {{64, 3, 1}, 0.695, 0.658},  {{80, 3, 1}, 0.752, 0.852},
    {{96, 3, 1}, 0.815, 0.931},  {{112, 3, 1}, 0.900, 0.996},
    {{128, 3, 1}, 1.014, 1.047}, {{144, 2, 1}, 0.766, 0.765, kEvery},
    {{160, 2, 2}, 0.819, 0.803}, {{256, 2, 2}, 1.308, 1.267, kEvery},
};

// ---- 8-bit codes --------------------------------------------------------------------------------

// Products of 8-bit codes whose order of sums is free. Records are twice as large, so rings have
// fewer slots. H100, 2026-11-24: fitted to 2075 cases of four layer shapes at 20 counts of tokens
// from 17 to 4096 with activations of both types, 28 tiles. These are the fewest with which no case
// takes more than 2 % longer than with all. Groups of 128 make do with five.
inline constexpr TileCost kFreeTiles8[] = {
    {{32, 1, 1, 2, 1, 2}, 0.339, 0.339}, {{32, 2, 2}, 0.748, 0.748, kEvery},
    {{48, 2, 1, 2}, 0.610, 0.568},       {{64, 1, 1, 2, 1, 2}, 0.373, 0.371},
    {{64, 2, 1, 2}, 0.646, 0.640},       {{64, 2, 2}, 0.752, 0.750, kEvery},
    {{96, 2, 1, 2}, 0.694, 0.689},       {{96, 3, 1}, 1.030, 1.038},
    {{128, 1, 1, 2}, 0.420, 0.414},      {{128, 2, 1, 2}, 0.757, 0.753, kEvery},
    {{128, 2, 2}, 0.715, 0.704, kEvery}, {{160, 2, 1, 2}, 0.843, 0.844},
    {{160, 2, 2}, 0.848, 0.828},         {{192, 2, 1, 2}, 0.993, 0.979},
    {{192, 2, 2}, 0.991, 0.968, kEvery},
};

// ---- INT8 activations ---------------------------------------------------------------------------

// Where sums stay integers. H200, 2026-11-29, 4 and 8 bits, four layer shapes, 11 counts of tokens
// from 48 to 4096: by these costs the choice takes at most 1.5 % longer than the fastest of 16 timed
// tiles. Three of them are not here; without any of these a count takes over 4 % longer.
inline constexpr TileCost kIntegerTilesInt8[] = {
    {{64, 1, 1, 2}, 0.190, 0.190, kEvery},  {{64, 1, 1, 2, 1, 2}, 0.162, 0.162, kEvery},
    {{64, 2, 1, 2}, 0.280, 0.280, kEvery},  {{64, 2, 2}, 0.260, 0.260, kEvery},
    {{96, 2, 1, 2}, 0.360, 0.360, kEvery},  {{96, 2, 2}, 0.432, 0.432, kEvery},
    {{128, 1, 1, 2}, 0.280, 0.280, kEvery}, {{128, 2, 1, 2}, 0.400, 0.400, kEvery},
    {{128, 2, 2}, 0.408, 0.408, kEvery},    {{192, 2, 1, 2}, 0.520, 0.520, kEvery},
    {{192, 2, 2}, 0.520, 0.520, kEvery},    {{256, 2, 1, 2}, 0.640, 0.640, kEvery},
    {{256, 2, 2}, 0.640, 0.640, kEvery},
};

// Where groups along K have scales: sums are kept twice, as integers and in FP32, so tiles have at
// most 128 tokens and two consumers.
inline constexpr TileCost kFreeTilesInt8[] = {
    {{64, 1, 1, 2}, 0.190, 0.190, kEvery},  {{64, 2, 2}, 0.260, 0.260, kEvery},
    {{64, 2, 1, 2}, 0.280, 0.280, kEvery},  {{128, 1, 1, 2}, 0.280, 0.280, kEvery},
    {{128, 2, 1, 2}, 0.440, 0.440, kEvery}, {{128, 2, 2}, 0.440, 0.440, kEvery},
};

// ---- E4M3 activations ---------------------------------------------------------------------------

// Sums of a step lie beside those of all steps, so there are at most two consumers. Costs are those
// of E4M3 codes and scales for each token, of the largest counts on four layer shapes; H200,
// 2026-11-30.
inline constexpr TileCost kTilesE4m3[] = {
    {{64, 1, 1, 2, 1, 2}, 0.220, 0.220, kEvery}, {{64, 2, 1, 2}, 0.330, 0.330, kEvery},
    {{64, 2, 2}, 0.350, 0.350, kEvery},          {{128, 1, 1, 2}, 0.300, 0.300, kEvery},
    {{128, 2, 1, 2}, 0.480, 0.480, kEvery},      {{128, 2, 2}, 0.485, 0.485, kEvery},
    {{192, 2, 1, 2}, 0.690, 0.690, kEvery},      {{192, 2, 2}, 0.700, 0.700, kEvery},
    {{256, 2, 1, 2}, 0.850, 0.850, kEvery},      {{256, 2, 2}, 0.880, 0.880, kEvery},
};

// For experts, whose weights are read once or twice. Costs are guesses from those above.
inline constexpr TileCost kExpertTilesE4m3[] = {
    {{32, 2, 2}, 0.500, 0.500, kEvery},  {{64, 2, 2}, 0.520, 0.520, kEvery},
    {{96, 2, 2}, 0.535, 0.535, kEvery},  {{128, 2, 2}, 0.550, 0.550, kEvery},
    {{160, 2, 2}, 0.630, 0.630, kEvery}, {{192, 2, 2}, 0.720, 0.720, kEvery},
    {{256, 2, 2}, 0.890, 0.890, kEvery},
};

}  // namespace awqd::cuda
