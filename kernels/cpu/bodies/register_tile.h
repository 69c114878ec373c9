// A tile of sums in registers, over Vec: kRows rows of x times kColumns columns of a weight along a
// piece of K. Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/codes.h"

namespace awqd::cpu {
namespace {

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

}  // namespace
}  // namespace awqd::cpu
