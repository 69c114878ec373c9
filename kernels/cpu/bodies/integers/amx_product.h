// Products of many tokens by AMX, from panels of bytes (byte_panel_product.h): 16 quads of 16
// columns are what a register holds, and so are 64 bytes of 16 tokens, as they are. An instruction
// adds up 16384 products, where AVX-512 VNNI's adds 64. Sums are the same integers, and what they
// add to y is computed by the same operations, so bits are those of column_product.h.
//
//   registers   0 1 2 3   sums: of x 0 and both halves of the panel's columns, then of x 1
//               4 5       x 0 and 1: 16 tokens of INT8 each, or both planes of 16 tokens of INT16
//               6 7       codes: both halves of the columns
//
// Four sums, because the next instruction can begin long before the last one ends. While they are
// made, vectors add those of the span before to y, which with groups of 128 rows takes them about
// as long as AMX takes for the sums. So factors stay in registers, a column for all tokens, and
// zeros are taken off where that costs least: of codes of 4 bits, once in a panel.
//
// Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/byte_panel_product.h"

namespace awqd::cpu {
namespace {

// --- Epilogue ---

constexpr int kAmxTokens = 16;

// Whether zeros can be taken off codes: what is left is a signed byte. A constant may be too large.
inline bool TakesZerosOff(const K16Weight& w) {
  return w.bits == 4 && HasIntegerZeros(w) && w.zero <= 128;
}

// Off the codes of a panel.
void TakeZerosOff(const QuadPiece& piece) {
  ForGroups(piece, [&](const QuadGroup& at) AWQD_ALWAYS_INLINE {
    // The lowest byte of each lane, in all four.
    const __m512i all =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
    __m512i zeros[2];
    Times<2>([&](auto v) AWQD_ALWAYS_INLINE {
      zeros[v] = _mm512_shuffle_epi8(_mm512_loadu_si512(piece.zeros + at.cell + 16 * v), all);
    });
    uint32_t* quad = piece.scratch.panel + (at.begin - piece.begin) * kRunQuads * kPanelColumns;
    for (int64_t i = 0; i < (at.end - at.begin) * kRunQuads; ++i, quad += kPanelColumns) {
      Times<2>([&](auto v) AWQD_ALWAYS_INLINE {
        const __m512i codes = _mm512_loadu_si512(quad + 16 * v);
        _mm512_storeu_si512(quad + 16 * v, _mm512_sub_epi8(codes, zeros[v]));
      });
    }
  });
}

// `exact_floats`: floats hold the sums and what is taken off.
inline ZerosOfSums ZerosOf(const K16Weight& w, bool exact_floats) {
  if (TakesZerosOff(w)) return ZerosOfSums::kNone;
  if (HasIntegerZeros(w)) return exact_floats ? ZerosOfSums::kBefore : ZerosOfSums::kIntegers;
  return RealZeros(w);
}

// Sums of a span of at most 2 * kAmxTokens tokens of INT8, or kAmxTokens of INT16.
struct AmxTokens {
  // [tokens][kPanelColumns]; of INT16 the upper plane's, then, kAmxTokens rows on, the lower one's.
  const int32_t* sums = nullptr;
  int64_t tokens = 0;
  int64_t stride = 0;               // elements of the next two
  const int32_t* x_sums = nullptr;  // [tokens]
  const float* steps = nullptr;     // [tokens], of INT16
  int64_t cell = 0;                 // where the piece has the factors
  float* y = nullptr;               // [tokens][kPanelColumns]
};

template <bool kInt16, ZerosOfSums kZeros>
__attribute__((noinline)) void AddAmxSumsOf(const QuadPiece& piece, const AmxTokens& of) {
  for (int v = 0; v < kPanelColumns; v += 16) {
    const Vec::F scale = Vec::Load(piece.scratch.scales + of.cell + v);
    const Vec::F offset = Vec::Load(piece.scratch.offsets + of.cell + v);
    const __m512i zero = _mm512_loadu_si512(piece.zeros + of.cell + v);
    for (int64_t t = 0; t < of.tokens; ++t) {
      const int32_t* const sums = of.sums + t * kPanelColumns + v;
      float* const y = of.y + t * kPanelColumns + v;
      __m512i sum = _mm512_load_si512(sums);
      if constexpr (kInt16) {
        const __m512i low = _mm512_load_si512(sums + kAmxTokens * kPanelColumns);
        sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), low);
      }
      const __m512i x_sum = _mm512_set1_epi32(of.x_sums[t * of.stride]);
      if constexpr (kZeros == ZerosOfSums::kIntegers) {
        sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(zero, x_sum));
      }
      Vec::F value = {_mm512_cvtepi32_ps(sum)}, of_zeros = {_mm512_cvtepi32_ps(x_sum)};
      if constexpr (kInt16) {
        const Vec::F step = Vec::Set(of.steps[t * of.stride]);
        value = Vec::Mul(value, step);
        of_zeros = Vec::Mul(step, of_zeros);
      }
      if constexpr (kZeros == ZerosOfSums::kBefore) value = Vec::Fma(offset, of_zeros, value);
      Vec::F result = Vec::Fma(value, scale, Vec::Load(y));
      if constexpr (kZeros == ZerosOfSums::kAfter) result = Vec::Fma(offset, of_zeros, result);
      Vec::Store(y, result);
    }
  }
}

template <bool kInt16>
void AddAmxSums(const QuadPiece& piece, ZerosOfSums zeros, const AmxTokens& of) {
  WithCount<0, 3>(static_cast<int64_t>(zeros), [&](auto kind) AWQD_ALWAYS_INLINE {
    AddAmxSumsOf<kInt16, static_cast<ZerosOfSums>(kind.kValue)>(piece, of);
  });
}

// --- Sums ---

constexpr int64_t kAmxRows = 64, kAmxRuns = kAmxRows / kRunRows;
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

  // kX: 1 for x 0 alone, 2 for both.
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
  // Adds the products of `runs` runs of K, rounded up to a multiple of kAmxRuns. Tokens are
  // `x_stride` bytes apart, x 1 is `second` bytes behind x 0.
  template <int kX>
  AWQD_ALWAYS_INLINE void Multiply(const int8_t* x, int64_t x_stride, int64_t second,
                                   const uint32_t* panel, int64_t runs) {
    for (int64_t run = 0; run < runs; run += kAmxRuns, x += kAmxRows) {
      registers_.template Load<6>(panel + run * kRunQuads * kPanelColumns, kAmxStride);
      registers_.template Load<7>(panel + run * kRunQuads * kPanelColumns + 16, kAmxStride);
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

// --- INT8 ---

// At most kX * kAmxTokens tokens. A group's last runs may be fewer than are multiplied: what the
// panel has behind them meets zeros of x.
template <int kX, typename Tile>
void MultiplyInt8(const QuadPiece& piece, int64_t m, int64_t tokens, Tile& tile) {
  const K16Weight& w = piece.tiles.w;
  const int64_t stride = w.blocks * kBlockRows;
  const auto* const x = static_cast<const int8_t*>(piece.task.q) + m * stride;
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
    tile.template Multiply<kX>(x + at.begin * kRunRows, stride, kAmxTokens * stride,
                               piece.QuadsFrom(at.begin), at.end - at.begin);
    if (of.x_sums != nullptr) AddAmxSums<false>(piece, zeros, of);
    tile.template Store<kX>(at.ends ? sums : totals);
    of.x_sums = at.ends ? piece.task.sums + m * w.groups + at.group : nullptr;
    of.cell = at.cell;
  });
  if (of.x_sums != nullptr) AddAmxSums<false>(piece, zeros, of);
}

// --- INT16 ---

template <typename Tile>
void MultiplyInt16(const QuadPiece& piece, int64_t m, int64_t tokens, Tile& tile) {
  const K16Weight& w = piece.tiles.w;
  const IntegerTask& task = piece.task;
  const int64_t stride = w.blocks * kInt16BlockBytes;
  const auto* const x = static_cast<const int8_t*>(task.q) + m * stride;
  const ZerosOfSums zeros = ZerosOf(w, false);
  alignas(64) int32_t sums[2 * kAmxTokens * kPanelColumns];
  AmxTokens of = {.sums = sums, .tokens = tokens, .stride = w.blocks};
  of.y = piece.scratch.sums + m * kPanelColumns;
  const auto add = [&](int64_t block) AWQD_ALWAYS_INLINE {
    const int64_t of_group = RunsOfGroup(w), run = block * kBlockRuns;
    of.cell = (run / of_group - piece.begin / of_group) * kPanelColumns;
    of.x_sums = task.sums + m * w.blocks + block;
    of.steps = task.steps + m * w.blocks + block;
    AddAmxSums<true>(piece, zeros, of);
  };
  const int64_t first = piece.begin / kBlockRuns, end = piece.end / kBlockRuns;
  for (int64_t block = first; block < end; ++block) {
    tile.template Zero<2>();
    tile.template Multiply<2>(x + block * kInt16BlockBytes, stride, kBlockRows,
                              piece.QuadsFrom(block * kBlockRuns), kBlockRuns);
    if (block > first) add(block - 1);
    tile.template Store<2>(sums);
  }
  add(end - 1);
}

// --- Products ---

// kBytes: of INT8 or INT16 activations, 1 or 2.
template <typename Registers, int kBits, int kBytes>
void MultiplyByAmx(const K16Weight& w, const IntegerTask& task) {
  AmxTile<Registers, kBits> tile;
  const auto multiply = [&](const QuadPiece& piece) {
    if (TakesZerosOff(w)) TakeZerosOff(piece);
    for (int64_t m = 0; m < task.rows; m += 2 / kBytes * kAmxTokens) {
      const int64_t first = AtMostAmxTokens(task.rows - m);
      const int64_t second = kBytes == 2 ? first : AtMostAmxTokens(task.rows - m - first);
      tile.Configure(first, second);
      if constexpr (kBytes == 2) {
        MultiplyInt16(piece, m, first, tile);
      } else if (second > 0) {
        MultiplyInt8<2>(piece, m, first + second, tile);
      } else {
        MultiplyInt8<1>(piece, m, first, tile);
      }
    }
  };
  ForQuadPieces<kPieceRuns>(w, task, DecodeQuads<kBits>, multiply, StorePanel);
}

template <typename Registers>
void AmxInt16Product(const K16Weight& w, const IntegerTask& task) {
  if (w.bits == 8) return MultiplyByAmx<Registers, 8, 2>(w, task);
  MultiplyByAmx<Registers, 4, 2>(w, task);
}

// The tokens of INT8 from which on AMX is faster than AVX-512 VNNI: of 4 bits, the same in groups
// of less than 128 rows, and of 8 bits or one group, which few tokens are multiplied by without
// decoding or without folding (column_product.h).
struct AmxMinTokens {
  int64_t tokens;
  int64_t tokens_of_short_groups;
  int64_t tokens_of_bytes;

  constexpr int64_t For(const K16Weight& w) const {
    if (w.bits == 8 || w.groups == 1) return tokens_of_bytes;
    return w.runs_per_group < kBlockRuns ? tokens_of_short_groups : tokens;
  }
};

template <typename Registers, AmxMinTokens kMin>
void AmxInt8Product(const K16Weight& w, const IntegerTask& task) {
  const bool whole = w.groups == 1 || w.runs_per_group % kAmxRuns == 0;
  if (!whole || task.rows < kMin.For(w)) return Int8ByteProduct(w, task);
  if (w.bits == 8) return MultiplyByAmx<Registers, 8, 1>(w, task);
  MultiplyByAmx<Registers, 4, 1>(w, task);
}

}  // namespace
}  // namespace awqd::cpu
