// The fused product in FP32, written once over Vec and Codes. Everything has internal linkage.
//
// Computes: y[m, n] = sum over k of x[m, k] * W[k, n]. Every (m, n) is one chain of 16 lanes that
// walks K upwards and is folded at the end, whatever the tile or the number of rows: a row's bits
// do not depend on its batch mates. What is left of a column's scale multiplies its sums.
// Weight layout: k16. Work split: a task is a range of tiles for some rows. Loops from the outside:
// blocks of rows whose x stays in the L2 cache, tiles, pieces of K, groups of rows, columns that
// have registers. Limits: none.
#pragma once

#include "kernels/cpu/bodies/register_tile.h"

namespace awqd::cpu {
namespace {

// Runs in a piece of K. Between two pieces the lanes of sums go through memory: a piece is as long
// as the L2 cache allows, or the L1 cache where decoded weights are read from it.
constexpr int64_t kLongPiece = 256;
constexpr int64_t kPanelPiece = 32;
// 48 rows of a piece are 768 KiB (Zen 4, 4096 x 4096 and 4096 x 14336: 24 and 96 take up to 3 %
// longer).
constexpr int64_t kRowsAtOnce = 48;
// The parts of a thread's scratch, in floats: cells, decoded weights and lanes of sums.
struct Scratch {
  static constexpr int64_t kCells = kLongPiece * 8 * 16;   // [groups of the piece][8]
  static constexpr int64_t kPanel = kPanelPiece * 8 * 16;  // [8 / kColumns][runs][kColumns][16]
  static constexpr int64_t kLanes = kRowsAtOnce * 8 * 16;  // [rows of a block][8][16]
  static constexpr int64_t kFloats = kCells + kPanel + kLanes;

  float* cells;
  float* panel;
  float* lanes;
};

// One tile for kRows rows, in passes of as many columns as have registers. Functions of their own:
// their loops need every register.
//
// From codes and the cells of the piece.
template <typename Codes, int kRows>
__attribute__((noinline)) void PassesFromCodes(const Piece& piece, const Scratch& scratch,
                                               const Rows& rows, float* sums) {
  constexpr int kColumns = Vec::Columns(kRows);
  constexpr bool kReload = kRows * kColumns > Vec::kRoomySums;
  const auto* cells = reinterpret_cast<const typename Codes::Cell*>(scratch.cells);
  const float* x = rows.x;
  const int64_t x_stride = rows.x_stride;
  for (int first = 0; first < 8; first += kColumns) {
    RegisterTile<kRows, kColumns>(
        piece, first, rows, sums, [&](Vec::F(&acc)[kRows][kColumns]) AWQD_ALWAYS_INLINE {
          Decode<Codes, kReload, kColumns>(
              piece, first, cells, [&](int64_t run, auto weight) AWQD_ALWAYS_INLINE {
                Step<kRows, kColumns>(x + run * 16, x_stride, weight, acc);
              });
        });
  }
}

// From decoded weights, [runs of the piece][kColumns][16] for each pass.
template <int kRows>
__attribute__((noinline)) void PassesFromPanel(const Piece& piece, const Scratch& scratch,
                                               const Rows& rows, float* sums) {
  constexpr int kColumns = Vec::kColumns;
  for (int first = 0; first < 8; first += kColumns) {
    const float* x = rows.x + piece.begin * 16;
    const float* panel = scratch.panel + first * kPanelPiece * 16;
    const int64_t x_stride = rows.x_stride;
    RegisterTile<kRows, kColumns>(
        piece, first, rows, sums, [&](Vec::F(&acc)[kRows][kColumns]) AWQD_ALWAYS_INLINE {
          for (int64_t run = piece.begin; run < piece.end; ++run, x += 16, panel += kColumns * 16) {
            PanelStep<kRows, kColumns, Vec>(x, x_stride, panel, acc);
          }
        });
  }
}

template <typename Codes>
void DecodePanel(const Piece& piece, const Scratch& scratch) {
  constexpr int kColumns = Vec::kColumns;
  const auto store = [&](int64_t run, auto weight) AWQD_ALWAYS_INLINE {
    float* out = scratch.panel + (run - piece.begin) * kColumns * 16;
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      Vec::Store(out + c / kColumns * kColumns * kPanelPiece * 16 + c % kColumns * 16, weight(c));
    }
  };
  Decode<Codes, true, 8>(piece, 0, reinterpret_cast<const typename Codes::Cell*>(scratch.cells),
                         store);
}

void StoreSums(const K16Weight& w, const ProductTask& task, int64_t tile, int64_t begin,
               int64_t rows, float* sums) {
  float scales[8];
  if (SumScales(w, tile, scales)) {
    for (int64_t m = 0; m < rows; ++m) {
      for (int c = 0; c < 8; ++c) sums[m * 8 + c] *= scales[c];
    }
  }
  if (task.row_factors != nullptr) {
    for (int64_t m = 0; m < rows; ++m) {
      for (int c = 0; c < 8; ++c) sums[m * 8 + c] *= task.row_factors[begin + m];
    }
  }
  const float* bias = task.bias != nullptr ? task.bias + tile * 8 : nullptr;
  const int64_t columns = w.n - tile * 8;
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t index = (begin + m) * task.y_stride + tile * 8;
    if (columns >= 8) {
      Store8Plus(task.y, task.y_type, index, sums + m * 8, bias);
      continue;
    }
    for (int64_t c = 0; c < columns; ++c) {
      const float sum = sums[m * 8 + c];
      Store1(task.y, task.y_type, index + c, bias != nullptr ? sum + bias[c] : sum);
    }
  }
}

// Rows [block, block + rows) of the task. Rows in equal groups of as many as have registers: 8 rows
// are 4 + 4, not 6 + 2.
template <typename Codes>
void PieceOfProduct(const Piece& piece, const ProductTask& task, int64_t block, int64_t rows,
                    bool from_panel, const Scratch& scratch) {
  const int64_t groups = (rows + Vec::kRows - 1) / Vec::kRows;
  if constexpr (Codes::kCells) {
    const int64_t runs = piece.weight->runs_per_group;
    Codes::MakeCells(*piece.weight, piece.tile, piece.begin / runs, (piece.end - 1) / runs,
                     reinterpret_cast<typename Codes::Cell*>(scratch.cells));
  }
  if constexpr (Vec::kUsePanel) {
    if (from_panel) DecodePanel<Codes>(piece, scratch);
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = rows * g / groups;
    const int64_t count = rows * (g + 1) / groups - begin;
    const Rows part = {task.x + (block + begin) * task.x_stride, task.x_stride,
                       scratch.lanes + begin * 8 * 16};
    float sums[Vec::kRows * 8];
    if (from_panel) {
      if constexpr (Vec::kUsePanel) {
        WithCount<(Vec::kRows + 1) / 2, Vec::kRows>(
            count, [&](auto n) { PassesFromPanel<n.kValue>(piece, scratch, part, sums); });
      }
    } else {
      WithCount<1, Vec::kRows>(
          count, [&](auto n) { PassesFromCodes<Codes, n.kValue>(piece, scratch, part, sums); });
    }
    if (piece.IsLast()) StoreSums(*piece.weight, task, piece.tile, block + begin, count, sums);
  }
}

template <typename Codes>
void ProductOf(const K16Weight& w, const ProductTask& task) {
  const Scratch scratch = {task.scratch, task.scratch + Scratch::kCells,
                           task.scratch + Scratch::kCells + Scratch::kPanel};
  const int64_t blocks = (task.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = task.rows * b / blocks;
    const int64_t rows = task.rows * (b + 1) / blocks - begin;
    const bool from_panel = Vec::kUsePanel && rows > Vec::kRows;
    const int64_t step = from_panel ? kPanelPiece : kLongPiece;
    for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
      for (int64_t run = 0; run < w.runs; run += step) {
        const Piece piece = {&w, tile, run, run + step < w.runs ? run + step : w.runs};
        PieceOfProduct<Codes>(piece, task, begin, rows, from_panel, scratch);
      }
    }
  }
}

void Product(const K16Weight& w, const ProductTask& task) {
  if (w.bits == 4) return ProductOf<Nibbles>(w, task);
  if (w.bits < 4) return ProductOf<Narrow>(w, task);
  if (w.code == Code::kE4m3) {
    return w.scale_sums ? ProductOf<Bytes<Code::kE4m3, false>>(w, task)
                        : ProductOf<Bytes<Code::kE4m3, true>>(w, task);
  }
  return w.scale_sums ? ProductOf<Bytes<Code::kInteger, false>>(w, task)
                      : ProductOf<Bytes<Code::kInteger, true>>(w, task);
}

}  // namespace
}  // namespace awqd::cpu
