// The fused product in FP32, written once over Vec and Codes. Everything has internal linkage.
//
// Computes: y[m, n] = sum over k of x[m, k] * W[k, n]. Every (m, n) is one chain of 16 lanes that
// walks K upwards and is folded at the end, whatever the tile or the number of rows: a row's bits
// do not depend on its batch mates. What is left of a column's scale multiplies its sums.
// Weight layout: k16. Work split: a task is a range of tiles for some rows. Loops from the outside:
// blocks of rows whose x stays in the L2 cache, tiles, pieces of K, groups of rows, columns that
// have registers. Limits: none.
#pragma once

#include "kernels/cpu/bodies/codes.h"

namespace awqd::cpu {
namespace {

// --- A tile of sums in registers ---
//
// kRows rows of x times kColumns columns of a weight, along a piece of K.

// Runs [begin, end) of 16 rows of K, of one tile of 8 columns.
struct Piece {
  const K16Weight* weight;
  int64_t tile;
  int64_t begin;
  int64_t end;

  bool IsFirst() const { return begin == 0; }
  bool IsLast() const { return end == weight->runs; }
};

// Rows of x, and their unfinished sums between two pieces: [rows][8][16 lanes].
struct Rows {
  const float* x;
  int64_t x_stride;
  float* lanes;
};

// A whole block of 8 runs, with shifts known to the compiler. kReload: cells and codes are read
// from memory for every run, because sums need the registers.
template <bool kReload, int kRun, typename Cell, typename Block, typename Action>
AWQD_ALWAYS_INLINE inline void DecodeBlock(Block& block, const Cell* cells, int64_t run,
                                           Action action) {
  if constexpr (kRun < 8) {
    // Hides from the compiler that the same addresses are read again.
    if constexpr (kReload) {
      asm("" : "+r"(cells));
      block.Reload();
    }
    action(run, [&](int c) AWQD_ALWAYS_INLINE { return block.Get(cells, c, Number<kRun>()); });
    DecodeBlock<kReload, kRun + 1>(block, cells, run + 1, action);
  }
}

// Calls action(run, weight) for every run of the piece, upwards, where weight(c) is 16 weights of
// column first + c. `cells`: [groups of the piece][8].
template <typename Codes, bool kReload, int kColumns, typename Action>
AWQD_ALWAYS_INLINE inline void Decode(const Piece& piece, int first,
                                      const typename Codes::Cell* cells, Action action) {
  const K16Weight& w = *piece.weight;
  const int64_t block_bytes = Codes::BlockBytes(w), tile_bytes = 8 * block_bytes;
  const uint8_t* columns = w.codes + piece.tile * w.blocks * tile_bytes + first * block_bytes;
  const int64_t group = piece.begin / w.runs_per_group;
  int64_t group_end = (group + 1) * w.runs_per_group;
  // Every pass fetches its columns of the next tile into the L2 cache, so that memory is read
  // evenly: the passes after the first one over a tile would read nothing. A pass over whole tiles
  // is the only one, and fetches what comes 16 blocks later: 4096 x 14336, one token, two Zen 4
  // cores, 8 bits 1244 us, 1495 with the next tile, 1393 with 4 blocks (2026-11-24). Hardware
  // prefetchers stop at the end of a page.
  const int64_t most = kColumns == 8 ? 16 : w.blocks;
  const int64_t ahead = (w.blocks < 8 ? 8 : w.blocks < most ? w.blocks : most) * tile_bytes;
  typename Codes::template Block<kColumns> block(w);
  cells += first;
  for (int64_t run = piece.begin; run < piece.end; group_end += w.runs_per_group, cells += 8) {
    const int64_t end = group_end < piece.end ? group_end : piece.end;
    while (run < end) {
      const uint8_t* at = columns + run / 8 * tile_bytes;
      for (int64_t line = 0; line < kColumns * block_bytes; line += 64) {
        __builtin_prefetch(at + ahead + line, kRead, kL2Cache);
      }
      block.Open(at);
      if (Vec::kUnroll && run % 8 == 0 && end - run >= 8) {
        DecodeBlock<kReload, 0>(block, cells, run, action);
        run += 8;
        continue;
      }
      const int64_t stop = run / 8 * 8 + 8 < end ? run / 8 * 8 + 8 : end;
      for (; run < stop; ++run) {
        action(run, [&](int c) AWQD_ALWAYS_INLINE {
          return block.Get(cells, c, static_cast<int>(run % 8));
        });
      }
    }
  }
}

// acc[m][c] += x[m] * weight(c) for one run; the shorter side is loaded first.
template <int kRows, int kColumns, typename Weight>
AWQD_ALWAYS_INLINE inline void Step(const float* x, int64_t x_stride, Weight weight,
                                    Vec::F acc[kRows][kColumns]) {
  if constexpr (kRows < kColumns) {
    Vec::F row[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) row[m] = Vec::Load(x + m * x_stride);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const Vec::F w = weight(c);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) acc[m][c] = Vec::Fma(row[m], w, acc[m][c]);
    }
  } else {
    Vec::F w[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) w[c] = weight(c);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Vec::F row = Vec::Load(x + m * x_stride);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) acc[m][c] = Vec::Fma(row, w[c], acc[m][c]);
    }
  }
}

// The same with decoded weights, part by part of a vector: so that those of x and of the weights
// fit into registers next to the sums, and each is loaded once.
template <int kRows, int kColumns, typename V, int kPart = 0>
AWQD_ALWAYS_INLINE inline void PanelStep(const float* x, int64_t x_stride, const float* panel,
                                         typename V::F acc[kRows][kColumns]) {
  if constexpr (kPart < V::kParts) {
    typename V::Part w[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) w[c] = V::template LoadPart<kPart>(panel + c * 16);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const typename V::Part row = V::template LoadPart<kPart>(x + m * x_stride);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) V::template FmaPart<kPart>(row, w[c], &acc[m][c]);
    }
    PanelStep<kRows, kColumns, V, kPart + 1>(x, x_stride, panel, acc);
  }
}

// Columns [first, first + kColumns) of a tile for kRows rows: `add` adds to sums of 16 lanes. Where
// the piece is the last, sums[m * 8 + column] are written.
template <int kRows, int kColumns, typename Add>
AWQD_ALWAYS_INLINE inline void RegisterTile(const Piece& piece, int first, const Rows& rows,
                                            float* sums, Add add) {
  Vec::F acc[kRows][kColumns];
  for (int m = 0; m < kRows; ++m) {
    for (int c = 0; c < kColumns; ++c) {
      acc[m][c] = piece.IsFirst() ? Vec::Zero() : Vec::Load(rows.lanes + (m * 8 + first + c) * 16);
    }
  }
  add(acc);
  if (piece.IsLast()) {
    alignas(64) float folded[(kRows * kColumns + 15) / 16 * 16];
    Vec::Sums<kRows * kColumns>(acc[0], folded);
    for (int m = 0; m < kRows; ++m) {
      for (int c = 0; c < kColumns; ++c) sums[m * 8 + first + c] = folded[m * kColumns + c];
    }
    return;
  }
  for (int m = 0; m < kRows; ++m) {
    for (int c = 0; c < kColumns; ++c) {
      Vec::Store(rows.lanes + (m * 8 + first + c) * 16, acc[m][c]);
    }
  }
}

// --- The product ---

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

// The product of a block of vector codes.
void VectorBlock(const int8_t* codes, const float* scales, const float* x, int64_t x_stride,
                 int64_t rows, float* lanes) {
  constexpr int kRuns = 16;
  alignas(64) float weights[kRuns * 16];
  for (int run = 0; run < kRuns; ++run) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(codes + 16 * run);
    Vec::Store(weights + 16 * run, Vec::Mul(Vec::Signed(bytes), Vec::Set(scales[run])));
  }
  for (int64_t m = 0; m < rows; ++m, x += x_stride, lanes += kVectorLanes) {
    // Two chains, because an addition waits for the one before it.
    Vec::F even = Vec::Load(lanes), odd = Vec::Load(lanes + 16);
    for (int at = 0; at < kRuns * 16; at += 32) {
      even = Vec::Fma(Vec::Load(weights + at), Vec::Load(x + at), even);
      odd = Vec::Fma(Vec::Load(weights + at + 16), Vec::Load(x + at + 16), odd);
    }
    Vec::Store(lanes, even);
    Vec::Store(lanes + 16, odd);
  }
}

}  // namespace
}  // namespace awqd::cpu
