// The fused product, written once over Vec. Included by one source per instruction set, after its
// Vec; everything has internal linkage.
//
// Computes: y[m, n] = sum over k of x[m, k] * W[k, n]. Every (m, n) is one chain of 16 lanes that
// walks K upwards and is folded at the end, whatever the tile or the number of rows: a row's bits
// do not depend on its batch mates.
// Weight layout: k16. Work split: a task is a range of tiles for some rows; rows are taken in
// groups whose x stays in the L2 cache while the tiles go by. Limits: none.
#pragma once

#include "kernels/cpu/bodies.h"

namespace awqd::cpu {
namespace {

// Tables of the columns of one group of one tile.
template <int kCount>
inline void MakeTables(const K16Weight& w, int64_t tile, int64_t group, int first,
                       Vec::Table* tables) {
  const int64_t cell = (tile * w.groups + group) * 8;
  float scales[8], zeros[8];
  Load8To(w.scales, w.scale_type, cell, scales);
  if (w.zeros != nullptr) {
    Zeros8(w.zeros + cell, zeros);
  } else {
    for (float& z : zeros) z = w.zero;
  }
  const bool round = w.scale_type == Element::kFp16;
  for (int c = 0; c < kCount; ++c) {
    tables[c] = Vec::MakeTable(scales[first + c], zeros[first + c], round);
  }
}

// One run of 16 rows: decoded weights of kColumns columns against kRows rows of x.
template <int kRows, int kColumns>
inline void Step(const Vec::F* weights, const float* x, int64_t x_stride,
                 Vec::F acc[kRows][kColumns]) {
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
    const Vec::F row = Vec::Load(x + m * x_stride);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) acc[m][c] = Vec::Fma(row, weights[c], acc[m][c]);
  }
}

template <int kRows, int kColumns, int kRun>
inline void StepAt(const uint32_t* words, const Vec::Table* tables, const float* x,
                   int64_t x_stride, Vec::F acc[kRows][kColumns]) {
  Vec::F weights[kColumns];
#pragma GCC unroll 8
  for (int c = 0; c < kColumns; ++c) {
    weights[c] = Vec::LookupAt<kRun>(tables[c], words + c * 16);
  }
  Step<kRows, kColumns>(weights, x + kRun * 16, x_stride, acc);
}

// A whole block of 8 runs, with shifts known to the compiler.
template <int kRows, int kColumns>
inline void Block(const uint32_t* words, const Vec::Table* tables, const float* x, int64_t x_stride,
                  Vec::F acc[kRows][kColumns]) {
  StepAt<kRows, kColumns, 0>(words, tables, x, x_stride, acc);
  StepAt<kRows, kColumns, 1>(words, tables, x, x_stride, acc);
  StepAt<kRows, kColumns, 2>(words, tables, x, x_stride, acc);
  StepAt<kRows, kColumns, 3>(words, tables, x, x_stride, acc);
  StepAt<kRows, kColumns, 4>(words, tables, x, x_stride, acc);
  StepAt<kRows, kColumns, 5>(words, tables, x, x_stride, acc);
  StepAt<kRows, kColumns, 6>(words, tables, x, x_stride, acc);
  StepAt<kRows, kColumns, 7>(words, tables, x, x_stride, acc);
}

// Where the weights of a run come from: codes, or the panel of decoded ones.
struct Source {
  const K16Weight* weight;
  int64_t tile;
  int first;  // column within the tile
};

template <int kRows, int kColumns>
inline void Decode(const Source& source, const float* x, int64_t x_stride,
                   Vec::F acc[kRows][kColumns]) {
  const K16Weight& w = *source.weight;
  const uint32_t* words = w.codes + source.tile * w.blocks * 128 + source.first * 16;
  int64_t run = 0;
  for (int64_t group = 0; group < w.groups; ++group) {
    Vec::Table tables[kColumns];
    MakeTables<kColumns>(w, source.tile, group, source.first, tables);
    for (const int64_t end = run + w.runs_per_group; run < end;) {
      const uint32_t* block = words + run / 8 * 128;
      // Hardware prefetchers stop at the end of a page.
      __builtin_prefetch(block + 512);
      if (kColumns > 4) {
        for (int line = 1; line < kColumns; ++line) __builtin_prefetch(block + 512 + line * 16);
      }
      if (run % 8 == 0 && end - run >= 8) {
        Block<kRows, kColumns>(block, tables, x + run * 16, x_stride, acc);
        run += 8;
        continue;
      }
      const int64_t stop = run / 8 * 8 + 8 < end ? run / 8 * 8 + 8 : end;
      for (; run < stop; ++run) {
        Vec::F weights[kColumns];
        for (int c = 0; c < kColumns; ++c) {
          weights[c] = Vec::Lookup(tables[c], block + c * 16, static_cast<int>(run % 8));
        }
        Step<kRows, kColumns>(weights, x + run * 16, x_stride, acc);
      }
    }
  }
}

template <int kRows, int kColumns>
inline void FromPanel(const float* panel, int64_t runs, const float* x, int64_t x_stride,
                      Vec::F acc[kRows][kColumns]) {
  for (int64_t run = 0; run < runs; ++run) {
    Vec::F weights[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      weights[c] = Vec::Load(panel + (run * kColumns + c) * 16);
    }
    Step<kRows, kColumns>(weights, x + run * 16, x_stride, acc);
  }
}

// kRows x kColumns sums; `panel` null: decode as we go.
template <int kRows, int kColumns>
inline void Tile(const Source& source, const float* panel, const float* x, int64_t x_stride,
                 float* out) {
  Vec::F acc[kRows][kColumns];
  for (auto& row : acc) {
    for (Vec::F& a : row) a = Vec::Zero();
  }
  if (panel != nullptr) {
    const int64_t runs = source.weight->groups * source.weight->runs_per_group;
    FromPanel<kRows, kColumns>(panel, runs, x, x_stride, acc);
  } else {
    Decode<kRows, kColumns>(source, x, x_stride, acc);
  }
  for (int m = 0; m < kRows; ++m) {
    for (int c = 0; c < kColumns; ++c) out[m * 8 + source.first + c] = Vec::Sum(acc[m][c]);
  }
}

// All 8 columns of a tile for kRows rows.
template <int kRows>
inline void TileRows(const K16Weight& w, int64_t tile, const float* panel, const float* x,
                     int64_t x_stride, float* out) {
  constexpr bool kWide = kRows * 8 <= Vec::kRows * Vec::kColumns && kRows <= 2;
  constexpr int kColumns = kWide ? 8 : Vec::kColumns;
  if (panel == nullptr) {
    for (int first = 0; first < 8; first += kColumns) {
      Tile<kRows, kColumns>({&w, tile, first}, nullptr, x, x_stride, out);
    }
    return;
  }
  const int64_t padded_k = w.groups * w.runs_per_group * 16;
  for (int first = 0; first < 8; first += Vec::kColumns) {
    Tile<kRows, Vec::kColumns>({&w, tile, first}, panel + first * padded_k, x, x_stride, out);
  }
}

inline void TileOfRows(const K16Weight& w, int64_t rows, int64_t tile, const float* panel,
                       const float* x, int64_t x_stride, float* out) {
  switch (rows) {
    case 1:
      return TileRows<1>(w, tile, panel, x, x_stride, out);
    case 2:
      return TileRows < Vec::kRows >= 2 ? 2 : 1 > (w, tile, panel, x, x_stride, out);
    case 3:
      return TileRows < Vec::kRows >= 3 ? 3 : 1 > (w, tile, panel, x, x_stride, out);
    case 4:
      return TileRows < Vec::kRows >= 4 ? 4 : 1 > (w, tile, panel, x, x_stride, out);
    case 5:
      return TileRows < Vec::kRows >= 5 ? 5 : 1 > (w, tile, panel, x, x_stride, out);
    default:
      return TileRows < Vec::kRows >= 6 ? 6 : 1 > (w, tile, panel, x, x_stride, out);
  }
}

// Decodes one tile: [8 / kColumns][runs][kColumns][16].
inline void DecodePanel(const K16Weight& w, int64_t tile, float* panel) {
  constexpr int kColumns = Vec::kColumns;
  const int64_t padded_k = w.groups * w.runs_per_group * 16;
  const uint32_t* words = w.codes + tile * w.blocks * 128;
  int64_t run = 0;
  for (int64_t group = 0; group < w.groups; ++group) {
    Vec::Table tables[8];
    MakeTables<8>(w, tile, group, 0, tables);
    for (const int64_t end = run + w.runs_per_group; run < end; ++run) {
      const uint32_t* block = words + run / 8 * 128;
      for (int c = 0; c < 8; ++c) {
        float* out =
            panel + c / kColumns * kColumns * padded_k + (run * kColumns + c % kColumns) * 16;
        Vec::Store(out, Vec::Lookup(tables[c], block + c * 16, static_cast<int>(run % 8)));
      }
    }
  }
}

inline int64_t PanelFloats(const K16Weight& w) {
  return Vec::kUsePanel ? w.groups * w.runs_per_group * 16 * 8 : 0;
}

void Product(const K16Weight& w, const ProductTask& task) {
  // Rows in equal groups of at most kRows: 8 rows are 4 + 4, not 6 + 2.
  const int64_t groups = (task.rows + Vec::kRows - 1) / Vec::kRows;
  const bool use_panel = Vec::kUsePanel && groups > 1;
  // With a panel the tile is outermost, so that it is decoded once; without, x stays in cache.
  const int64_t outer_tiles = use_panel ? task.tile_end - task.tile_begin : 1;
  const int64_t inner_tiles = use_panel ? 1 : task.tile_end - task.tile_begin;
  for (int64_t outer = 0; outer < outer_tiles; ++outer) {
    const int64_t first = task.tile_begin + outer;
    if (use_panel) DecodePanel(w, first, task.panel);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = task.rows * g / groups;
      const int64_t rows = task.rows * (g + 1) / groups - begin;
      const float* x = task.x + begin * task.x_stride;
      for (int64_t tile = first; tile < first + inner_tiles; ++tile) {
        float sums[Vec::kRows * 8];
        TileOfRows(w, rows, tile, use_panel ? task.panel : nullptr, x, task.x_stride, sums);
        for (int64_t m = 0; m < rows; ++m) {
          Store8Plus(task.y, task.y_type, (begin + m) * task.y_stride + tile * 8, sums + m * 8,
                     task.bias != nullptr ? task.bias + tile * 8 : nullptr);
        }
      }
    }
  }
}

}  // namespace
}  // namespace awqd::cpu
