// A tile of sums in registers, over Vec: kRows rows of x times kColumns columns of a weight along a
// piece of K. Included by product_body.h; everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies.h"

// Accumulators stay in registers only where every function between them and the loop is inlined,
// which the compiler's own limits do not promise: behind a call each FMA waits for memory and
// takes three times as long.
#define AWQD_ALWAYS_INLINE __attribute__((always_inline))

namespace awqd::cpu {
namespace {

// Of __builtin_prefetch.
constexpr int kRead = 0;
constexpr int kL2Cache = 2;

// Runs [begin, end) of 16 rows of K, of one tile of 8 columns.
struct Piece {
  const K16Weight* weight;
  int64_t tile;
  int64_t begin;
  int64_t end;

  bool IsFirst() const { return begin == 0; }
  bool IsLast() const { return end == weight->groups * weight->runs_per_group; }
};

// Rows of x, and their unfinished sums between two pieces: [rows][8][16 lanes].
struct Rows {
  const float* x;
  int64_t x_stride;
  float* lanes;
};

// The tables of the 8 columns of one group of a tile.
inline void MakeTables(const K16Weight& w, int64_t tile, int64_t group, Vec::Table* tables) {
  const int64_t cell = (tile * w.groups + group) * 8;
  // The next tile's cells; scales have 16 bits.
  __builtin_prefetch(w.scales + (cell + w.groups * 8) * 2);
  if (w.zeros != nullptr) __builtin_prefetch(w.zeros + cell + w.groups * 8);
  float scales[8];
  Load8To(w.scales, w.scale_type, cell, scales);
  uint8_t middle[8];
  if (w.zeros == nullptr) {
    for (uint8_t& z : middle) z = static_cast<uint8_t>(w.zero);
  }
  Vec::MakeTables(scales, w.zeros != nullptr ? w.zeros + cell : middle,
                  w.scale_type == Element::kFp16, tables);
}

// A whole block of 8 runs, with shifts known to the compiler. kReload: tables and codes are read
// from memory for every run, because sums need the registers.
template <bool kReload, int kRun, typename Action>
AWQD_ALWAYS_INLINE inline void DecodeBlock(const uint32_t* block, const Vec::Table* tables,
                                           int64_t run, Action action) {
  if constexpr (kRun < 8) {
    // Hides from the compiler that the same addresses are read again.
    if constexpr (kReload) asm("" : "+r"(tables), "+r"(block));
    action(run, [&](int c)
                    AWQD_ALWAYS_INLINE { return Vec::LookupAt<kRun>(tables[c], block + c * 16); });
    DecodeBlock<kReload, kRun + 1>(block, tables, run + 1, action);
  }
}

// Calls action(run, weight) for every run of the piece, upwards, where weight(c) is 16 weights of
// column first + c. `tables`: [groups of the piece][8].
template <bool kReload, int kColumns, typename Action>
AWQD_ALWAYS_INLINE inline void Decode(const Piece& piece, int first, const Vec::Table* tables,
                                      Action action) {
  const K16Weight& w = *piece.weight;
  const uint32_t* words = w.codes + piece.tile * w.blocks * 128 + first * 16;
  const int64_t group = piece.begin / w.runs_per_group;
  int64_t group_end = (group + 1) * w.runs_per_group;
  // Every pass fetches its columns of the next tile into the L2 cache, so that memory is read
  // evenly: the passes after the first one over a tile would read nothing. Hardware prefetchers
  // stop at the end of a page.
  const int64_t ahead = w.blocks < 8 ? 8 * 128 : w.blocks * 128;
  tables += first;
  for (int64_t run = piece.begin; run < piece.end; group_end += w.runs_per_group, tables += 8) {
    const int64_t end = group_end < piece.end ? group_end : piece.end;
    while (run < end) {
      const uint32_t* block = words + run / 8 * 128;
      for (int c = 0; c < kColumns; ++c)
        __builtin_prefetch(block + ahead + c * 16, kRead, kL2Cache);
      if (run % 8 == 0 && end - run >= 8) {
        DecodeBlock<kReload, 0>(block, tables, run, action);
        run += 8;
        continue;
      }
      const int64_t stop = run / 8 * 8 + 8 < end ? run / 8 * 8 + 8 : end;
      for (; run < stop; ++run) {
        action(run, [&](int c) AWQD_ALWAYS_INLINE {
          return Vec::Lookup(tables[c], block + c * 16, static_cast<int>(run % 8));
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
// fit into registers next to the sums, and each is loaded once. V is Vec where that has a panel.
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

// Columns [first, first + kColumns) of a tile for kRows rows. Weights come from `panel`,
// [runs of the piece][kColumns][16], or from codes and `tables`. Where the piece is the last,
// sums[m * 8 + column] are written.
template <int kRows, int kColumns, bool kFromPanel>
AWQD_ALWAYS_INLINE inline void RegisterTile(const Piece& piece, int first, const float* panel,
                                            const Vec::Table* tables, const Rows& rows,
                                            float* sums) {
  Vec::F acc[kRows][kColumns];
  for (int m = 0; m < kRows; ++m) {
    for (int c = 0; c < kColumns; ++c) {
      acc[m][c] = piece.IsFirst() ? Vec::Zero() : Vec::Load(rows.lanes + (m * 8 + first + c) * 16);
    }
  }
  const float* x = rows.x;
  const int64_t x_stride = rows.x_stride;
  if constexpr (kFromPanel) {
    for (int64_t run = piece.begin; run < piece.end; ++run, panel += kColumns * 16) {
      PanelStep<kRows, kColumns, Vec>(x + run * 16, x_stride, panel, acc);
    }
  } else {
    constexpr bool kReload = kRows * kColumns > Vec::kRoomySums;
    Decode<kReload, kColumns>(piece, first, tables,
                              [&](int64_t run, auto weight) AWQD_ALWAYS_INLINE {
                                Step<kRows, kColumns>(x + run * 16, x_stride, weight, acc);
                              });
  }
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
