// Products of few tokens of INT8 from packed panels of bytes, with AVX-512 VNNI: a lane has a quad,
// four codes of one of 32 columns, and sums are not folded. Codes of 4 or 8 bits, groups of whole
// runs of 16 rows. Where groups are whole blocks and codes have 4 bits, the rows of a quad are 32
// apart, as they are stored. Otherwise they are neighbours: a panel of 4 bits then takes a
// transpose. Bits are those of column_product.h.
//
// Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/column_product.h"

namespace awqd::cpu {
namespace {

constexpr int kRunQuads = 4;

// Runs that are multiplied: where rows of a block are in the order of codes, all of the last block.
inline int64_t QuadRuns(const K16Weight& w) { return HasWholeBlocks(w) ? w.blocks * 8 : w.runs; }
inline int64_t RunsOfGroup(const K16Weight& w) {
  return w.groups == 1 ? QuadRuns(w) : w.runs_per_group;
}

inline __m512i LoadQuads(const uint32_t* words) {
  return (__m512i)IntVec::LoadTransposed(words).r[0];
}

// The four bytes of each lane of four vectors, transposed.
inline void TransposeBytes(const __m512i (&in)[4], __m512i (&out)[4]) {
  const auto select = [](int mask, __m512i a, __m512i b) AWQD_ALWAYS_INLINE {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), a, b, 0xca);
  };
  constexpr int kEven = 0x00ff00ff, kLow = 0x0000ffff;
  __m512i even[2], odd[2];
  for (int i = 0; i < 2; ++i) {
    even[i] = select(kEven, in[2 * i], _mm512_slli_epi32(in[2 * i + 1], 8));
    odd[i] = select(kEven, _mm512_srli_epi32(in[2 * i], 8), in[2 * i + 1]);
  }
  out[0] = select(kLow, even[0], _mm512_slli_epi32(even[1], 16));
  out[1] = select(kLow, odd[0], _mm512_slli_epi32(odd[1], 16));
  out[2] = select(kLow, _mm512_srli_epi32(even[0], 16), even[1]);
  out[3] = select(kLow, _mm512_srli_epi32(odd[0], 16), odd[1]);
}

// 32 quads of a block of 16 columns, from 16 words of 4-bit codes each, kPanelColumns apart. In the
// order of codes, or rows follow each other.
inline void StoreNibbles(const uint32_t* words, bool in_order, uint32_t* out) {
  const __m512i mask = _mm512_set1_epi8(15);
  const auto store = [&](__m512i bytes, int low, int high) AWQD_ALWAYS_INLINE {
    _mm512_storeu_si512(out + low * kPanelColumns, _mm512_and_si512(bytes, mask));
    _mm512_storeu_si512(out + high * kPanelColumns,
                        _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask));
  };
  if (!in_order) {
    for (int i = 0; i < 16; ++i) {
      store(LoadQuads(words + i * kPanelColumns), i, 16 + i);
    }
    return;
  }
  for (int i = 0; i < 4; ++i) {
    __m512i rows[4], quads[4];
    for (int r = 0; r < 4; ++r) {
      rows[r] = LoadQuads(words + (4 * i + r) * kPanelColumns);
    }
    TransposeBytes(rows, quads);
    // Byte b of a word has a row of run 2 b below one of run 2 b + 1.
    for (int b = 0; b < 4; ++b) {
      store(quads[b], 2 * b * kRunQuads + i, (2 * b + 1) * kRunQuads + i);
    }
  }
}

// Quads of runs [begin, end), whole blocks: [quads][kPanelColumns] lanes.
template <int kBits>
void DecodeQuads(const PanelTiles& p, int64_t begin, int64_t end, uint32_t* panel) {
  alignas(64) uint32_t words[16 * kPanelColumns];
  const bool in_order = !HasWholeBlocks(p.w);
  for (int64_t block = begin / 8; block * 8 < end; ++block) {
    for (int t = 0; t < kPanelTiles; ++t) PrefetchAhead(p.w, p.Tile(t), block);
    uint32_t* const out = panel + (block * 8 - begin) * kRunQuads * kPanelColumns;
    for (int half = 0; half < (kBits == 8 ? 2 : 1); ++half) {
      for (int t = 0; t < kPanelTiles; ++t) {
        LoadWords<kBits>(p.w, BlockOf(p.w, p.Tile(t), block), half, words + t * 8);
      }
      for (int v = 0; v < IntVec::kVectors; ++v) {
        if constexpr (kBits == 8) {
          const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
          for (int i = 0; i < 16; ++i) {
            const __m512i lanes = LoadQuads(words + i * kPanelColumns + 16 * v);
            _mm512_storeu_si512(out + (half * 16 + i) * kPanelColumns + 16 * v,
                                _mm512_xor_si512(lanes, sign));
          }
        } else {
          StoreNibbles(words + 16 * v, in_order, out + 16 * v);
        }
      }
    }
  }
}

// Whether integer zeros can be taken off in FP32, in one instruction: sums of a group are below
// 2^24 (255 * 128 * 512), and so are their differences.
inline bool HasExactFloats(const K16Weight& w) {
  return HasIntegerZeros(w) && RunsOfGroup(w) * kRunRows <= 512;
}

// Runs [begin, end) of K, which the panel holds.
struct QuadPiece {
  const PanelTiles& tiles;
  const IntegerTask& task;
  const PanelScratch& scratch;
  int32_t* zeros;  // [groups of the piece][kPanelColumns]
  int64_t begin = 0;
  int64_t end = 0;

  // The factors and zeros of the groups that have rows in it.
  void LoadFactorsOfGroups() const {
    const K16Weight& w = tiles.w;
    const int64_t first = begin / RunsOfGroup(w), last = (end - 1) / RunsOfGroup(w);
    for (int64_t group = first, cell = 0; group <= last; ++group, cell += kPanelColumns) {
      for (int t = 0; t < kPanelTiles; ++t)
        PrefetchCells(w, tiles.Tile(t) + kPanelTiles - 1, group);
      LoadFactors(tiles, group, cell, scratch);
      for (int t = 0; HasIntegerZeros(w) && t < kPanelTiles; ++t) {
        float values[8];
        LoadZeros(w, (tiles.Tile(t) * w.groups + group) * 8, values);
        const int64_t at = cell + t * 8;
        const __m256 floats = _mm256_loadu_ps(values);
        _mm256_storeu_ps(scratch.offsets + at, _mm256_sub_ps(_mm256_setzero_ps(), floats));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(zeros + at), _mm256_cvtps_epi32(floats));
      }
    }
  }
  const uint32_t* QuadsFrom(int64_t run) const {
    return scratch.panel + (run - begin) * kRunQuads * kPanelColumns;
  }
  // [rows][kPanelColumns]: of groups that are longer than a piece.
  int32_t* Totals(int64_t m) const {
    return reinterpret_cast<int32_t*>(scratch.totals) + m * kPanelColumns;
  }
};

// Runs [begin, end) of a group, all that the piece has of it.
struct QuadGroup {
  int64_t group = 0;
  int64_t cell = 0;  // where the piece has its factors
  int64_t begin = 0;
  int64_t end = 0;
  bool goes_on = false;  // from the piece before: totals hold its sums so far
  bool ends = false;
};

template <typename Act>
AWQD_ALWAYS_INLINE inline void ForGroups(const QuadPiece& piece, Act act) {
  const K16Weight& w = piece.tiles.w;
  const int64_t of_group = RunsOfGroup(w);
  QuadGroup at = {.end = piece.begin};
  for (; at.end < piece.end; at.cell += kPanelColumns) {
    at.begin = at.end;
    at.group = at.begin / of_group;
    const int64_t border = at.group + 1 < w.groups ? (at.group + 1) * of_group : QuadRuns(w);
    at.goes_on = at.begin > at.group * of_group;
    at.ends = border <= piece.end;
    at.end = at.ends ? border : piece.end;
    act(at);
  }
}

// y += what a group adds, of 16 columns of a token, whose factors are at `cell`.
AWQD_ALWAYS_INLINE inline void AddQuadGroup(const QuadPiece& piece, bool exact_floats, __m512i sum,
                                            int32_t x_sum, int64_t cell, float* y) {
  const K16Weight& w = piece.tiles.w;
  const PanelScratch& scratch = piece.scratch;
  if (exact_floats) {
    const Vec::F value = Vec::Fma(Vec::Load(scratch.offsets + cell),
                                  Vec::Set(static_cast<float>(x_sum)), {_mm512_cvtepi32_ps(sum)});
    Vec::Store(y, Vec::Fma(value, Vec::Load(scratch.scales + cell), Vec::Load(y)));
    return;
  }
  if (HasIntegerZeros(w)) {
    const __m512i zeros = _mm512_loadu_si512(piece.zeros + cell);
    sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(zeros, _mm512_set1_epi32(x_sum)));
  }
  AddPanelSpan(RealZeros(w), scratch, {_mm512_cvtepi32_ps(sum)}, static_cast<float>(x_sum), cell,
               y);
}

// sums += q times codes of so many quads.
template <int kTokens>
AWQD_ALWAYS_INLINE inline void AddQuads(const int8_t* x, int64_t x_stride, const uint32_t* panel,
                                        int64_t quads, __m512i (&sums)[kTokens][2]) {
  for (int64_t i = 0; i < quads; ++i, panel += kPanelColumns, x += 4) {
    const __m512i low = _mm512_loadu_si512(panel), high = _mm512_loadu_si512(panel + 16);
    Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
      int32_t quad;
      std::memcpy(&quad, x + t * x_stride, sizeof(quad));
      const __m512i all = _mm512_set1_epi32(quad);
      sums[t][0] = _mm512_dpbusd_epi32(sums[t][0], low, all);
      sums[t][1] = _mm512_dpbusd_epi32(sums[t][1], high, all);
    });
  }
}

template <int kTokens>
__attribute__((noinline)) void MultiplyQuads(const QuadPiece& piece, int64_t m) {
  const K16Weight& w = piece.tiles.w;
  const IntegerTask& task = piece.task;
  const int64_t stride = w.blocks * kBlockRows;
  const auto* const x = static_cast<const int8_t*>(task.q) + m * stride;
  const bool exact_floats = HasExactFloats(w);
  int32_t* const totals = piece.Totals(m);
  ForGroups(piece, [&](const QuadGroup& at) AWQD_ALWAYS_INLINE {
    __m512i sums[kTokens][2];
    Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
      Times<2>([&](auto v) AWQD_ALWAYS_INLINE {
        sums[t][v] = at.goes_on ? _mm512_loadu_si512(totals + t * kPanelColumns + 16 * v)
                                : _mm512_setzero_si512();
      });
    });
    AddQuads<kTokens>(x + at.begin * kRunRows, stride, piece.QuadsFrom(at.begin),
                      (at.end - at.begin) * kRunQuads, sums);
    Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
      const int32_t x_sum = at.ends ? task.sums[(m + t) * w.groups + at.group] : 0;
      Times<2>([&](auto v) AWQD_ALWAYS_INLINE {
        if (!at.ends) {
          _mm512_storeu_si512(totals + t * kPanelColumns + 16 * v, sums[t][v]);
          return;
        }
        AddQuadGroup(piece, exact_floats, sums[t][v], x_sum, at.cell + 16 * v,
                     piece.scratch.sums + (m + t) * kPanelColumns + 16 * v);
      });
    });
  });
}

// y of a task, kRuns runs of K at a time: decode(tiles, begin, end, panel) makes a panel of them,
// multiply(piece) adds the sums of its groups to the scratch's, which store(tiles, task, scratch)
// writes.
template <int64_t kRuns, typename Decode, typename Multiply, typename Store>
void ForQuadPieces(const K16Weight& w, const IntegerTask& task, Decode decode, Multiply multiply,
                   Store store) {
  const PanelScratch scratch(task.scratch);
  alignas(64) int32_t zeros[kPieceRuns * kPanelColumns];
  const int64_t runs = QuadRuns(w);
  ForPanels(w, task, [&](const PanelTiles& tiles) {
    const int64_t rows = (task.rows + kLaneTokens - 1) / kLaneTokens * kLaneTokens;
    std::memset(scratch.sums, 0, rows * kPanelColumns * sizeof(float));
    QuadPiece piece = {tiles, task, scratch, zeros};
    for (; piece.begin < runs; piece.begin = piece.end) {
      piece.end = piece.begin + kRuns < runs ? piece.begin + kRuns : runs;
      decode(tiles, piece.begin, piece.end, scratch.panel);
      piece.LoadFactorsOfGroups();
      multiply(piece);
    }
    store(tiles, task, scratch);
  });
}

template <int kBits>
void BytePanelProduct(const K16Weight& w, const IntegerTask& task) {
  const auto multiply = [&](const QuadPiece& piece) {
    ForTokens(task.rows, [&](int64_t m, auto n) { MultiplyQuads<n.kValue>(piece, m); });
  };
  ForQuadPieces<kPieceRuns>(w, task, DecodeQuads<kBits>, multiply, StorePanel);
}

// Few tokens.
void Int8ByteProduct(const K16Weight& w, const IntegerTask& task) {
  if (HasWholeBlocks(w)) return ColumnProduct<1>(w, task);
  if (w.bits == 8) return BytePanelProduct<8>(w, task);
  BytePanelProduct<4>(w, task);
}

}  // namespace
}  // namespace awqd::cpu
