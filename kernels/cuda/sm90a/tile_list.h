// The tiles that are compiled, and what a step of each costs. Kernels are instantiated from these
// lists, and tiles.cc chooses from them. Each list has a file of its own, tile_list_*.h, because
// all kernels of a list are compiled anew when it changes.
//
// Costs are microseconds on an H100. tests/bench/tile_costs.py fits them to timings of
// awqd_bench --tiles.
#pragma once

#include <cstdint>

#include "kernels/cuda/sm90a/tiles.h"

namespace awqd::cuda {

struct TileCost {
  PersistentTile tile;
  // Microseconds of a step, 128 of K, while no multiprocessor is idle. BF16 takes longer where
  // decoding is the limit, and less time where the tensor cores are: they draw less power.
  double fp16_us;
  double bf16_us;
  // The kinds of records that it is compiled for, bits of RecordKind. Nearly all weights have
  // groups of 128 or more: these get every tile, the others a few.
  uint32_t kinds = kOneMeta;
};

// E2M1 and E4M3 take some of the tiles of integers of as many bits.
inline constexpr uint32_t kEvery = kOneMeta | kTwoMetas | kFineMetas | kE2m1;
inline constexpr uint32_t kEvery8 = kBare8 | kOneMeta8 | kBareE4m3;

}  // namespace awqd::cuda
