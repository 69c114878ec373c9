// Products of many tokens of INT8 or INT16 from packed panels of bytes, with AVX-512 VNNI. A lane
// has a quad, four neighbours of one of 16 tokens; all lanes are multiplied by a quad of a column's
// codes. So codes stay in the order in which they are stored, and sums are not folded. Codes of 4
// or 8 bits, groups of whole runs of 16 rows. Where groups are whole blocks the rows of a quad are
// those of column_product.h, otherwise neighbours. Bits are those of column_product.h.
//
// Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/byte_panel_product.h"

namespace awqd::cpu {
namespace {

// A panel is to share the L1 cache with tokens (4096 x 4096, 16 tokens: 6 % faster than 32 runs).
constexpr int64_t kLaneRuns = 16;
constexpr int64_t kPieceBytes = kLaneRuns * kRunRows;  // of a column

// --- Prologue ---

// IntegerProduct::interleave.
[[maybe_unused]] void InterleaveTokens(const void* in, int64_t rows, int64_t words, void* out) {
  auto* to = static_cast<uint32_t*>(out);
  for (int64_t word = 0; word < words; word += 16, to += 16 * kLaneTokens) {
    const int64_t count = words - word < 16 ? words - word : 16;
    alignas(64) uint32_t tokens[kLaneTokens * 16] = {};
    for (int64_t m = 0; m < rows; ++m) {
      std::memcpy(tokens + m * 16, static_cast<const uint32_t*>(in) + m * words + word, count * 4);
    }
    TransposeTile(tokens, to, kLaneTokens);
    TransposeTile(tokens + 8 * 16, to + 8, kLaneTokens);
  }
}

// --- Decoding ---

// 128 codes of 4 bits of a column in the order of rows. Byte b of lane i has row 32 b + i below row
// 32 b + 16 + i; four lanes are made quads, then quads follow each other.
inline void StoreInOrder(__m512i low, __m512i high, uint8_t* out) {
  const __m512i bytes =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  low = _mm512_shuffle_epi8(low, bytes);
  high = _mm512_shuffle_epi8(high, bytes);
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
  _mm512_store_si512(out, _mm512_permutex2var_epi32(low, first, high));
  _mm512_store_si512(out + 64, _mm512_permutex2var_epi32(low, second, high));
}

// Runs [begin, end), of which the first begins a block, as bytes: [kPanelColumns][kPieceBytes].
template <int kBits>
void DecodeColumns(const PanelTiles& p, int64_t begin, int64_t end, uint32_t* panel) {
  const bool in_order = !HasWholeBlocks(p.w);
  const __m512i mask = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(static_cast<char>(0x80));
  for (int64_t block = begin / kBlockRuns; block * kBlockRuns < end; ++block) {
    auto* out = reinterpret_cast<uint8_t*>(panel) + (block * kBlockRuns - begin) * kRunRows;
    for (int t = 0; t < kPanelTiles; ++t) {
      PrefetchAhead(p.w, p.Tile(t), block);
      const uint8_t* codes = BlockOf(p.w, p.Tile(t), block);
      for (int c = 0; c < 8; ++c, codes += 16 * kBits, out += kPieceBytes) {
        const __m512i bytes = _mm512_loadu_si512(codes);
        if constexpr (kBits == 8) {
          _mm512_store_si512(out, _mm512_xor_si512(bytes, sign));
          _mm512_store_si512(out + 64, _mm512_xor_si512(_mm512_loadu_si512(codes + 64), sign));
          continue;
        }
        const __m512i low = _mm512_and_si512(bytes, mask);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
        if (in_order) {
          StoreInOrder(low, high, out);
        } else {
          _mm512_store_si512(out, low);
          _mm512_store_si512(out + 64, high);
        }
      }
    }
  }
}

// --- Multiplying ---

// Columns whose sums stay in registers.
constexpr int kLaneColumns = 16;
static_assert(kPanelColumns % kLaneColumns == 0);

// The sums of tokens from `m` on, as many as V has lanes, and of kLaneColumns columns from `column`
// on. In scratch, totals and sums are [kPanelColumns][kLaneTokens] for each kLaneTokens. V: Vec, or
// Columns8 for at most 8 tokens. kBytes: of INT8 or INT16, 1 or 2.
template <typename V, int kBytes>
class LaneTile {
 public:
  LaneTile(const QuadPiece& piece, int64_t m, int64_t column)
      : piece_(piece), w_(piece.tiles.w), m_(m), column_(column) {}

  AWQD_ALWAYS_INLINE void Multiply() const {
    const char* const x =
        static_cast<const char*>(piece_.task.q) + m_ * w_.blocks * kBytes * kBlockRows;
    const auto* const panel = reinterpret_cast<const uint8_t*>(piece_.scratch.panel);
    ForGroups(piece_, [&](const QuadGroup& at) AWQD_ALWAYS_INLINE {
      const uint8_t* codes = panel + column_ * kPieceBytes + (at.begin - piece_.begin) * kRunRows;
      const char* q = x + at.begin * kRunRows * kBytes * kLaneTokens;
      if constexpr (kBytes == 2) {
        constexpr int64_t kPlane = kBlockRows * kLaneTokens;
        for (int64_t run = at.begin; run < at.end; run += kBlockRuns) {
          Words sums[kLaneColumns] = {};
          AddQuads(codes, q, kBlockRows / 4, sums);
          Times<kLaneColumns>([&](auto c) AWQD_ALWAYS_INLINE { sums[c] = sums[c] << 8; });
          AddQuads(codes, q + kPlane, kBlockRows / 4, sums);
          AddSpanOf(run / kBlockRuns, at.cell, sums);
          codes += kBlockRows, q += 2 * kPlane;
        }
      } else {
        int32_t* const totals = piece_.Totals(0) + InScratch();
        Words sums[kLaneColumns];
        Times<kLaneColumns>([&](auto c) AWQD_ALWAYS_INLINE {
          sums[c] = at.goes_on ? LoadAs<Words>(totals + c * kLaneTokens) : Words{};
        });
        AddQuads(codes, q, (at.end - at.begin) * kRunQuads, sums);
        if (at.ends) return AddSpanOf(at.group, at.cell, sums);
        Times<kLaneColumns>([&](auto c)
                                AWQD_ALWAYS_INLINE { StoreAs(totals + c * kLaneTokens, sums[c]); });
      }
    });
  }

 private:
  using Types = VectorsOf<sizeof(typename V::F) / 4>;
  using Words = typename Types::Words;

  int64_t InScratch() const { return m_ * kPanelColumns + column_ * kLaneTokens; }

  // In assembly, because GCC 12 moves sums between registers and through memory in every turn of a
  // loop over it.
  AWQD_ALWAYS_INLINE static void AddDots(Words codes, Words x, Words* sums) {
    asm("vpdpbusd %2, %1, %0" : "+v"(*sums) : "v"(codes), "v"(x));
  }
  // sums += x times codes of so many quads.
  AWQD_ALWAYS_INLINE static void AddQuads(const uint8_t* codes, const char* x, int64_t quads,
                                          Words (&sums)[kLaneColumns]) {
    for (int64_t i = 0; i < quads; ++i, codes += 4, x += 4 * kLaneTokens) {
      const auto tokens = LoadAs<Words>(x);
      Times<kLaneColumns>([&](auto c) AWQD_ALWAYS_INLINE {
        AddDots(Words{} + LoadAs<uint32_t>(codes + c * kPieceBytes), tokens, &sums[c]);
      });
    }
  }

  AWQD_ALWAYS_INLINE static typename V::F ToFloat(Words v) {
    return {__builtin_convertvector((typename Types::Ints)v, typename Types::Floats)};
  }

  // Adds what a span adds, whose group has its factors at `cell`.
  AWQD_ALWAYS_INLINE void AddSpanOf(int64_t span, int64_t cell,
                                    const Words (&sums)[kLaneColumns]) const {
    const int64_t spans = kBytes == 2 ? w_.blocks : w_.groups;
    const int64_t words = (spans + kLaneTokens - 1) / kLaneTokens * kLaneTokens;
    const int64_t at = m_ * words + span * kLaneTokens;
    const auto q_sums = LoadAs<Words>(piece_.task.sums + at);
    typename V::F x_sums = ToFloat(q_sums), steps;
    if constexpr (kBytes == 2) {
      steps = V::Load(piece_.task.steps + at);
      x_sums = V::Mul(x_sums, steps);
    }
    const int32_t* const zero = piece_.zeros + cell + column_;
    const float* const scales = piece_.scratch.scales + cell + column_;
    const float* const offsets = piece_.scratch.offsets + cell + column_;
    float* const y = piece_.scratch.sums + InScratch();
    const bool in_floats = kBytes == 1 && HasExactFloats(w_);
    WithZeros(in_floats ? ZerosOfSums::kBefore : RealZeros(w_), [&](auto zeros) AWQD_ALWAYS_INLINE {
      Times<kLaneColumns>([&](auto c) AWQD_ALWAYS_INLINE {
        Words sum = sums[c];
        if constexpr (decltype(zeros)::kValue == ZerosOfSums::kNone) {
          sum = sum - q_sums * static_cast<uint32_t>(zero[c]);
        }
        typename V::F value = ToFloat(sum);
        if constexpr (kBytes == 2) value = V::Mul(value, steps);
        float* const to = y + c * kLaneTokens;
        V::Store(to, AddSpan<V>(zeros, value, x_sums, V::Set(scales[c]), V::Set(offsets[c]),
                                V::Load(to)));
      });
    });
  }

  const QuadPiece& piece_;
  const K16Weight& w_;
  const int64_t m_, column_;
};

template <typename V, int kBytes>
__attribute__((noinline)) void MultiplyLanes(const QuadPiece& piece, int64_t m, int64_t column) {
  LaneTile<V, kBytes>(piece, m, column).Multiply();
}

// --- Epilogue ---

[[maybe_unused]] void StoreLanes(const PanelTiles& p, const IntegerTask& task,
                                 const PanelScratch& scratch) {
  for (int t = 0; t < kPanelTiles && p.first + t <= p.last; ++t) {
    float outer[8];
    LoadOuter(p.w, p.first + t, outer);
    for (int64_t m = 0; m < task.rows; m += kLaneTokens) {
      const int64_t left = task.rows - m, tokens = left < kLaneTokens ? left : kLaneTokens;
      const float* const sums = scratch.sums + m * kPanelColumns + t * 8 * kLaneTokens;
      alignas(64) float x_scale[kLaneTokens], values[8 * kLaneTokens], y[kLaneTokens * 8];
      for (float& scale : x_scale) scale = 1;
      if (task.x_scale != nullptr) std::memcpy(x_scale, task.x_scale + m, tokens * sizeof(float));
      for (int c = 0; c < 8; ++c) {
        const Vec::F scaled = Vec::Mul(Vec::Load(sums + c * kLaneTokens), Vec::Set(outer[c]));
        Vec::Store(values + c * kLaneTokens, Vec::Mul(scaled, Vec::Load(x_scale)));
      }
      TransposeTile(reinterpret_cast<const uint32_t*>(values), reinterpret_cast<uint32_t*>(y), 8);
      for (int64_t i = 0; i < tokens; ++i) StoreToken(p.w, task, p.first + t, m + i, y + i * 8);
    }
  }
}

template <int kBits, int kBytes>
void LaneProductOf(const K16Weight& w, const IntegerTask& task) {
  const auto multiply = [&](const QuadPiece& piece) {
    for (int64_t m = 0; m < task.rows; m += kLaneTokens) {
      for (int64_t c = 0; c < kPanelColumns; c += kLaneColumns) {
        if (task.rows - m > 8) {
          MultiplyLanes<Vec, kBytes>(piece, m, c);
        } else {
          MultiplyLanes<Columns8, kBytes>(piece, m, c);
        }
      }
    }
  };
  ForQuadPieces<kLaneRuns>(w, task, DecodeColumns<kBits>, multiply, StoreLanes);
}

template <int kBytes>
void LaneProduct(const K16Weight& w, const IntegerTask& task) {
  if (w.bits == 8) return LaneProductOf<8, kBytes>(w, task);
  LaneProductOf<4, kBytes>(w, task);
}

}  // namespace
}  // namespace awqd::cpu
