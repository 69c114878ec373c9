// Layout "k16": runs of 16 along K, for decoding with a 16-entry table in a vector register.
#pragma once

#include <cstdint>

#include "kernels/layouts/layout.h"

namespace awqd {

extern const Layout kK16Layout;

// Numbers that the layout and its readers share. A "run" is 16 consecutive rows of one group; a
// "block" is 8 runs of one column, 64 bytes; a "tile" is 8 columns. Groups are padded to whole
// runs.
struct K16Shape {
  static constexpr int64_t kRun = 16;
  static constexpr int64_t kRunsPerBlock = 8;
  static constexpr int64_t kTile = 8;
  static constexpr int64_t kWordsPerBlock = 16;

  int64_t tiles = 0;
  int64_t groups = 0;
  int64_t runs_per_group = 0;
  int64_t runs = 0;    // of one column
  int64_t blocks = 0;  // of one column

  explicit K16Shape(const WeightShape& shape)
      : tiles(shape.n / kTile),
        groups(shape.groups()),
        runs_per_group(CeilDiv(shape.scheme.group_size, kRun)),
        runs(groups * runs_per_group),
        blocks(CeilDiv(runs, kRunsPerBlock)) {}
};

}  // namespace awqd
