// Products of many tokens by AMX, of panels of quads (byte_panel_product.h): 16 quads of 16 columns
// are what a register holds, and so are 64 bytes of 16 tokens, as they are. An instruction adds up
// 16384 products, where AVX-512 VNNI's adds 64. Sums are the same integers, and what they add to y
// is computed by the same operations (amx_sums.h), so bits are those of quads_body.h and
// column_product.h.
//
//   registers   0 1 2 3   sums: of x 0 and both halves of the panel's columns, then of x 1
//               4 5       x 0 and 1: 16 tokens of INT8 each, or both digits of 16 tokens
//               6 7       codes: both halves of the columns
//
// Four sums, because the next instruction can begin long before the last one ends. While they are
// made, vectors add those of the group before to y.
//
// Included by the body file for AMX, behind byte_panel_product.h; everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/amx_sums.h"

namespace awqd::cpu {
namespace {

constexpr int64_t kAmxRows = 64, kAmxRuns = kAmxRows / kRowsOfRun;
constexpr int64_t kAmxStride = kPanelColumns * 4;  // bytes, of panels and of sums

template <typename Registers, int kBits>
class AmxTile {
 public:
  // So many tokens of each x, at most kAmxTokens.
  void Configure(int64_t first, int64_t second) {
    if (tokens_[0] == first && tokens_[1] == second) return;
    tokens_[0] = first, tokens_[1] = second;
    const auto of_first = static_cast<uint8_t>(first), of_second = static_cast<uint8_t>(second);
    registers_.Configure({of_first, of_first, of_second, of_second, of_first, of_second, 16, 16});
  }

  // Of x 0, and of x 1 where kX is 2; so are the others.
  template <int kX>
  AWQD_ALWAYS_INLINE void Zero() {
    Times<2 * kX>([&](auto i) AWQD_ALWAYS_INLINE { registers_.template Zero<i.kValue>(); });
  }
  // Sums of x 0, then, kAmxTokens rows on, of x 1.
  template <int kX>
  AWQD_ALWAYS_INLINE void Load(const int32_t* sums) {
    Times<2 * kX>([&](auto i) AWQD_ALWAYS_INLINE {
      registers_.template Load<i.kValue>(sums + Offset(i.kValue), kAmxStride);
    });
  }
  template <int kX>
  AWQD_ALWAYS_INLINE void Store(int32_t* sums) {
    Times<2 * kX>([&](auto i) AWQD_ALWAYS_INLINE {
      registers_.template Store<i.kValue>(sums + Offset(i.kValue), kAmxStride);
    });
  }
  // Of `runs` of K, or some more: a multiple of kAmxRuns. Tokens are `x_stride` bytes apart, x 1 is
  // `second` bytes behind x 0.
  template <int kX>
  AWQD_ALWAYS_INLINE void Multiply(const int8_t* x, int64_t x_stride, int64_t second,
                                   const uint32_t* panel, int64_t runs) {
    for (int64_t run = 0; run < runs; run += kAmxRuns, x += kAmxRows) {
      registers_.template Load<6>(panel + run * kQuadsOfRun * kPanelColumns, kAmxStride);
      registers_.template Load<7>(panel + run * kQuadsOfRun * kPanelColumns + 16, kAmxStride);
      Times<kX>([&](auto i) AWQD_ALWAYS_INLINE {
        constexpr int kSums = 2 * i.kValue, kFrom = 4 + i.kValue;
        registers_.template Load<kFrom>(x + i.kValue * second, x_stride);
        // Codes of 4 bits less their zeros have signs.
        registers_.template AddProducts<kSums, kFrom, 6, kBits == 4>();
        registers_.template AddProducts<kSums + 1, kFrom, 7, kBits == 4>();
      });
    }
  }

 private:
  static constexpr int64_t Offset(int i) { return i / 2 * kAmxTokens * kPanelColumns + i % 2 * 16; }

  Registers registers_;
  int64_t tokens_[2] = {};
};

inline int64_t AtMostAmxTokens(int64_t tokens) { return tokens < kAmxTokens ? tokens : kAmxTokens; }

// --- Quantised activations ---

// Of kX times kAmxTokens tokens at most. A group's last runs may be fewer than are multiplied: what
// the panel has behind them meets zeros of x.
template <int kX, typename Tile>
void MultiplyQuads(const QuadPiece& piece, const QuadTask& task, int64_t m, int64_t tokens,
                   Tile& tile) {
  const K16Weight& w = piece.panel.w;
  const int64_t stride = w.blocks * kIntegerRows;
  int32_t* const totals = piece.Totals(m);
  const ZerosOfSums zeros = ZerosOf(w, HasExactFloats(w));
  alignas(64) int32_t sums[2 * kAmxTokens * kPanelColumns];
  AmxTokens of = {.sums = sums, .tokens = tokens, .stride = w.groups};
  of.y = piece.scratch.sums + m * kPanelColumns;
  ForGroups(piece, [&](const QuadGroup& at) AWQD_ALWAYS_INLINE {
    if (at.goes_on) {
      tile.template Load<kX>(totals);
    } else {
      tile.template Zero<kX>();
    }
    tile.template Multiply<kX>(task.x + m * stride + at.begin * kRowsOfRun, stride,
                               kAmxTokens * stride, piece.QuadsFrom(at.begin), at.end - at.begin);
    if (of.x_sums != nullptr) AddAmxSums<false>(piece, zeros, of);
    tile.template Store<kX>(at.ends ? sums : totals);
    of.x_sums = at.ends ? task.sums + m * w.groups + at.group : nullptr;
    of.cell = at.cell;
  });
  if (of.x_sums != nullptr) AddAmxSums<false>(piece, zeros, of);
}

template <typename Registers, int kBits>
void AmxQuads(const K16Weight& w, const QuadTask& task) {
  AmxTile<Registers, kBits> tile;
  ForQuadPieces<kBits>(w, task, task.x_scale, [&](const QuadPiece& piece) {
    if (TakesZerosOff(w)) TakeZerosOff(piece);
    for (int64_t m = 0; m < task.rows; m += 2 * kAmxTokens) {
      const int64_t first = AtMostAmxTokens(task.rows - m);
      const int64_t second = AtMostAmxTokens(task.rows - m - first);
      tile.Configure(first, second);
      if (second > 0) {
        MultiplyQuads<2>(piece, task, m, first + second, tile);
      } else {
        MultiplyQuads<1>(piece, task, m, first, tile);
      }
    }
  });
}

// Tokens from which on AMX is faster than AVX-512 VNNI: of 4 bits, the same in groups of less than
// 128 rows, and of 8 bits or one group, which few tokens are multiplied by without decoding or
// without folding (byte_panel_product.h).
struct AmxLeast {
  int64_t tokens;
  int64_t tokens_of_short_groups;
  int64_t tokens_of_bytes;
};

inline int64_t LeastAmxTokens(const K16Weight& w, const AmxLeast& least) {
  if (w.bits == 8 || w.groups == 1) return least.tokens_of_bytes;
  return w.runs_per_group < kRunsOfDigits ? least.tokens_of_short_groups : least.tokens;
}

template <typename Registers, AmxLeast kLeast>
void AmxQuadProduct(const K16Weight& w, const QuadTask& task) {
  const bool whole = w.groups == 1 || w.runs_per_group % kAmxRuns == 0;
  if (!whole || task.rows < LeastAmxTokens(w, kLeast)) return QuadProduct(w, task);
  if (w.bits == 8) return AmxQuads<Registers, 8>(w, task);
  AmxQuads<Registers, 4>(w, task);
}

// --- FP16 and BF16 activations, by digits ---

template <typename Tile>
void MultiplyDigits(const QuadPiece& piece, const StandInTask& task, int64_t m, int64_t tokens,
                    Tile& tile) {
  const K16Weight& w = piece.panel.w;
  const int64_t stride = w.blocks * kIntegerBytes;
  const auto* const digits = static_cast<const int8_t*>(task.values) + m * stride;
  const ZerosOfSums zeros = ZerosOf(w, false);
  alignas(64) int32_t sums[2 * kAmxTokens * kPanelColumns];
  AmxTokens of = {.sums = sums, .tokens = tokens, .stride = w.blocks};
  of.y = piece.scratch.sums + m * kPanelColumns;
  const auto add = [&](int64_t block) AWQD_ALWAYS_INLINE {
    const int64_t of_group = RunsOfGroup(w), run = block * kRunsOfDigits;
    of.cell = (run / of_group - piece.begin / of_group) * kPanelColumns;
    of.x_sums = task.sums + m * w.blocks + block;
    of.steps = task.steps + m * w.blocks + block;
    AddAmxSums<true>(piece, zeros, of);
  };
  const int64_t first = piece.begin / kRunsOfDigits, end = piece.end / kRunsOfDigits;
  for (int64_t block = first; block < end; ++block) {
    tile.template Zero<2>();
    tile.template Multiply<2>(digits + block * kIntegerBytes, stride, kIntegerRows,
                              piece.QuadsFrom(block * kRunsOfDigits), kRunsOfDigits);
    if (block > first) add(block - 1);
    tile.template Store<2>(sums);
  }
  add(end - 1);
}

template <typename Registers, int kBits>
void AmxDigits(const K16Weight& w, const StandInTask& task) {
  AmxTile<Registers, kBits> tile;
  ForQuadPieces<kBits>(w, task, nullptr, [&](const QuadPiece& piece) {
    if (TakesZerosOff(w)) TakeZerosOff(piece);
    for (int64_t m = 0; m < task.rows; m += kAmxTokens) {
      const int64_t tokens = AtMostAmxTokens(task.rows - m);
      tile.Configure(tokens, tokens);
      MultiplyDigits(piece, task, m, tokens, tile);
    }
  });
}

template <typename Registers>
void AmxDigitProduct(const K16Weight& w, const StandInTask& task) {
  if (w.bits == 8) return AmxDigits<Registers, 8>(w, task);
  AmxDigits<Registers, 4>(w, task);
}

}  // namespace
}  // namespace awqd::cpu
