// The numbers of layout "k16", which stores runs of 16 along K for vector registers of 16 floats.
#pragma once

#include <cstdint>

#include "kernels/layouts/layout.h"

namespace awqd {

// Numbers that the layout and its readers share. A "run" is 16 consecutive rows of one group; a
// "block" is 8 runs of one column; a "tile" is 8 columns. Groups are padded to whole runs, columns
// to whole blocks, and N to whole tiles.
struct K16Shape {
  static constexpr int64_t kRun = 16;
  static constexpr int64_t kRunsPerBlock = 8;
  static constexpr int64_t kBlockRows = kRun * kRunsPerBlock;
  static constexpr int64_t kTile = 8;

  int64_t tiles = 0;
  int64_t groups = 0;
  int64_t runs_per_group = 0;  // the last group may be shorter
  int64_t runs = 0;            // of one column
  int64_t blocks = 0;          // of one column
  int bits = 0;                // bits of a stored code: its own, or 8 from 5 on

  explicit K16Shape(const WeightShape& shape)
      : tiles(CeilDiv(shape.n, kTile)),
        groups(shape.groups()),
        runs_per_group(CeilDiv(shape.group_rows(), kRun)),
        runs((groups - 1) * runs_per_group +
             CeilDiv(shape.k - (groups - 1) * shape.group_rows(), kRun)),
        blocks(CeilDiv(runs, kRunsPerBlock)),
        bits(shape.scheme.bits <= 4 ? shape.scheme.bits : 8) {}

  int64_t block_bytes() const { return kRun * bits; }
  int64_t tile_block_bytes() const { return kTile * block_bytes(); }
};

}  // namespace awqd
