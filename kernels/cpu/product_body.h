// The fused product, written once over Vec. Included by one source per instruction set, after its
// Vec; everything has internal linkage.
//
// Computes: y[m, n] = sum over k of x[m, k] * W[k, n]. Every (m, n) is one chain of 16 lanes that
// walks K upwards and is folded at the end, whatever the tile or the number of rows: a row's bits
// do not depend on its batch mates.
// Weight layout: k16. Work split: a task is a range of tiles for some rows. Loops from the outside:
// blocks of rows whose x stays in the L2 cache, tiles, pieces of K, groups of rows, columns that
// have registers. Limits: none.
#pragma once

#include "kernels/cpu/register_tile.h"

namespace awqd::cpu {
namespace {

// Runs in a piece of K. Between two pieces the lanes of sums go through memory: a piece is as long
// as the L2 cache allows, or the L1 cache where decoded weights are read from it.
constexpr int64_t kPieceRuns = Vec::kUsePanel ? 32 : 256;
// 48 rows of a piece are 768 KiB (Zen 4, 4096 x 4096 and 4096 x 14336: 24 and 96 take up to 3 %
// longer).
constexpr int64_t kBlockRows = 48;

// What a tile is multiplied from: the tables of a piece, or its decoded weights, and the lanes.
struct Scratch {
  Vec::Table* tables;  // [groups of the piece][8]
  float* panel;        // [8 / kColumns][kPieceRuns][kColumns][16]
  float* lanes;        // [rows of a block][8][16]
};

inline int64_t PieceRuns(const K16Weight& w) {
  const int64_t runs = w.groups * w.runs_per_group;
  return runs < kPieceRuns ? runs : kPieceRuns;
}

// One tile for kRows rows, in passes of as many columns as have registers.
template <int kRows>
void Passes(const Piece& piece, bool from_panel, const Scratch& scratch, const Rows& rows,
            float* sums) {
  if constexpr (Vec::kUsePanel) {
    constexpr int kColumns = Vec::kColumns;
    if (from_panel) {
      for (int first = 0; first < 8; first += kColumns) {
        const float* panel = scratch.panel + first * PieceRuns(*piece.weight) * 16;
        RegisterTile<kRows, kColumns, true>(piece, first, panel, nullptr, rows, sums);
      }
      return;
    }
  }
  constexpr int kColumns = Vec::Columns(kRows);
  for (int first = 0; first < 8; first += kColumns) {
    RegisterTile<kRows, kColumns, false>(piece, first, nullptr, scratch.tables, rows, sums);
  }
}

constexpr int AtMost(int rows) { return rows < Vec::kRows ? rows : Vec::kRows; }

void TileOfRows(const Piece& piece, int64_t count, bool from_panel, const Scratch& scratch,
                const Rows& rows, float* sums) {
  switch (count) {
    case 1:
      return Passes<AtMost(1)>(piece, from_panel, scratch, rows, sums);
    case 2:
      return Passes<AtMost(2)>(piece, from_panel, scratch, rows, sums);
    case 3:
      return Passes<AtMost(3)>(piece, from_panel, scratch, rows, sums);
    case 4:
      return Passes<AtMost(4)>(piece, from_panel, scratch, rows, sums);
    case 5:
      return Passes<AtMost(5)>(piece, from_panel, scratch, rows, sums);
    default:
      return Passes<AtMost(6)>(piece, from_panel, scratch, rows, sums);
  }
}

void PieceTables(const Piece& piece, Vec::Table* tables) {
  const int64_t runs = piece.weight->runs_per_group;
  const int64_t first = piece.begin / runs, last = (piece.end - 1) / runs;
  for (int64_t group = first; group <= last; ++group) {
    MakeTables(*piece.weight, piece.tile, group, tables + (group - first) * 8);
  }
}

void DecodePanel(const Piece& piece, const Scratch& scratch) {
  constexpr int kColumns = Vec::kColumns;
  const int64_t pass = PieceRuns(*piece.weight) * kColumns * 16;
  const auto store = [&](int64_t run, auto weight) AWQD_ALWAYS_INLINE {
    float* out = scratch.panel + (run - piece.begin) * kColumns * 16;
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      Vec::Store(out + c / kColumns * pass + c % kColumns * 16, weight(c));
    }
  };
  Decode<true, 8>(piece, 0, scratch.tables, store);
}

void StoreSums(const ProductTask& task, int64_t tile, int64_t begin, int64_t rows,
               const float* sums) {
  for (int64_t m = 0; m < rows; ++m) {
    Store8Plus(task.y, task.y_type, (begin + m) * task.y_stride + tile * 8, sums + m * 8,
               task.bias != nullptr ? task.bias + tile * 8 : nullptr);
  }
}

// Rows [block, block + rows) of the task.
void PieceOfProduct(const Piece& piece, const ProductTask& task, int64_t block, int64_t rows,
                    const Scratch& scratch) {
  // Rows in equal groups of at most kRows: 8 rows are 4 + 4, not 6 + 2.
  const int64_t groups = (rows + Vec::kRows - 1) / Vec::kRows;
  const bool from_panel = Vec::kUsePanel && groups > 1;
  PieceTables(piece, scratch.tables);
  if (from_panel) DecodePanel(piece, scratch);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = rows * g / groups;
    const int64_t count = rows * (g + 1) / groups - begin;
    const Rows part = {task.x + (block + begin) * task.x_stride, task.x_stride,
                       scratch.lanes + begin * 8 * 16};
    float sums[Vec::kRows * 8];
    TileOfRows(piece, count, from_panel, scratch, part, sums);
    if (piece.IsLast()) StoreSums(task, piece.tile, block + begin, count, sums);
  }
}

inline int64_t ScratchFloats(const K16Weight& w) {
  const int64_t piece = PieceRuns(w) * 8 * 16;
  return piece + (Vec::kUsePanel ? piece : 0) + kBlockRows * 8 * 16;
}

void Product(const K16Weight& w, const ProductTask& task) {
  const int64_t runs = w.groups * w.runs_per_group, step = PieceRuns(w);
  const int64_t floats = step * 8 * 16;
  const Scratch scratch = {reinterpret_cast<Vec::Table*>(task.scratch),
                           task.scratch + kBlockRows * 8 * 16 + floats, task.scratch + floats};
  const int64_t blocks = (task.rows + kBlockRows - 1) / kBlockRows;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = task.rows * b / blocks;
    const int64_t rows = task.rows * (b + 1) / blocks - begin;
    for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
      for (int64_t run = 0; run < runs; run += step) {
        const Piece piece = {&w, tile, run, run + step < runs ? run + step : runs};
        PieceOfProduct(piece, task, begin, rows, scratch);
      }
    }
  }
}

}  // namespace
}  // namespace awqd::cpu
