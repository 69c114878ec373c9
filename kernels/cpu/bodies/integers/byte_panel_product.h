// Products by quads (quads_body.h) of many tokens, or of groups that are no whole blocks: a panel
// of 32 columns, a lane for each, and sums that are not folded. Of groups of whole blocks a quad's
// rows are 32 apart, of 4 bits, as they are stored. Otherwise they are neighbours: a panel of 4
// bits then takes a transpose.
//
// Included by the body file for AVX-512 VNNI, behind quads_body.h; everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/quads_body.h"

namespace awqd::cpu {
namespace {

// Tokens that are multiplied by panels. Later where columns have no groups to fold at, or codes
// need no decoding (Zen 4, 4096 x 14336: 12 tokens of w4g128z 2.9 ms by panels, 11 3.1 without; of
// w8cs 3.9 and 2.4).
inline int64_t LeastOfPanel(const K16Weight& w) {
  if (!HasWholeBlocks(w)) return 0;
  return w.groups == 1 || w.bits == 8 ? 64 : 12;
}

constexpr int kQuadsOfRun = 4;

// Runs that are multiplied: where rows of a block are in the order of codes, all of the last block.
inline int64_t QuadRuns(const K16Weight& w) { return HasWholeBlocks(w) ? w.blocks * 8 : w.runs; }
inline int64_t RunsOfGroup(const K16Weight& w) {
  return w.groups == 1 ? QuadRuns(w) : w.runs_per_group;
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
      store(Pairs::LoadWritten(words + i * kPanelColumns).v, i, 16 + i);
    }
    return;
  }
  for (int i = 0; i < 4; ++i) {
    __m512i rows[4], quads[4];
    for (int r = 0; r < 4; ++r) {
      rows[r] = Pairs::LoadWritten(words + (4 * i + r) * kPanelColumns).v;
    }
    TransposeBytes(rows, quads);
    // Byte b of a word has a row of run 2 b below one of run 2 b + 1.
    for (int b = 0; b < 4; ++b) {
      store(quads[b], 2 * b * kQuadsOfRun + i, (2 * b + 1) * kQuadsOfRun + i);
    }
  }
}

// Quads of runs [begin, end), whole blocks: [quads][kPanelColumns] lanes.
template <int kBits>
void DecodeQuads(const PanelOf& p, int64_t begin, int64_t end, uint32_t* panel) {
  alignas(64) uint32_t words[16 * kPanelColumns];
  const bool in_order = !HasWholeBlocks(p.w);
  for (int64_t block = begin / 8; block * 8 < end; ++block) {
    for (int t = 0; t < kPanelTiles; ++t) PrefetchAhead(p.w, p.Tile(t), block);
    uint32_t* const out = panel + (block * 8 - begin) * kQuadsOfRun * kPanelColumns;
    for (int half = 0; half < (kBits == 8 ? 2 : 1); ++half) {
      for (int t = 0; t < kPanelTiles; ++t) {
        LoadWords<kBits>(p.w, BlockOf(p.w, p.Tile(t), block), half, words + t * 8);
      }
      for (int v = 0; v < Pairs::kVectors; ++v) {
        if constexpr (kBits == 8) {
          const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
          for (int i = 0; i < 16; ++i) {
            const __m512i lanes = Pairs::LoadWritten(words + i * kPanelColumns + 16 * v).v;
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
  return HasIntegerZeros(w) && RunsOfGroup(w) * kRowsOfRun <= 512;
}

// Runs [begin, end) of K, which the panel holds.
struct QuadPiece {
  const PanelOf& panel;
  const ScaledScratch& scratch;
  int32_t* zeros;  // [groups of the piece][kPanelColumns]
  int64_t begin = 0;
  int64_t end = 0;

  // Of the groups that have rows in it.
  void LoadCellsOfGroups() const {
    const K16Weight& w = panel.w;
    const int64_t first = begin / RunsOfGroup(w), last = (end - 1) / RunsOfGroup(w);
    LoadFactors(panel, first, last, scratch);
    if (!HasIntegerZeros(w)) return;
    for (int64_t group = first; group <= last; ++group) {
      for (int t = 0; t < kPanelTiles; ++t) {
        float values[8];
        LoadZeros(w, (panel.Tile(t) * w.groups + group) * 8, values);
        const int64_t at = (group - first) * kPanelColumns + t * 8;
        const __m256 floats = _mm256_loadu_ps(values);
        _mm256_storeu_ps(scratch.offsets + at, _mm256_sub_ps(_mm256_setzero_ps(), floats));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(zeros + at), _mm256_cvtps_epi32(floats));
      }
    }
  }
  const uint32_t* QuadsFrom(int64_t run) const {
    return scratch.panel + (run - begin) * kQuadsOfRun * kPanelColumns;
  }
  // [rows][kPanelColumns]: of groups that are longer than a piece.
  int32_t* Totals(int64_t m) const {
    return reinterpret_cast<int32_t*>(scratch.totals) + m * kPanelColumns;
  }
};

// What a piece has of a group: runs [begin, end).
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
  const K16Weight& w = piece.panel.w;
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
  const K16Weight& w = piece.panel.w;
  const ScaledScratch& scratch = piece.scratch;
  if (exact_floats) {
    const Vec::F value = Vec::Fma(Vec::Load(scratch.offsets + cell),
                                  Vec::Set(static_cast<float>(x_sum)), _mm512_cvtepi32_ps(sum));
    Vec::Store(y, Vec::Fma(value, Vec::Load(scratch.scales + cell), Vec::Load(y)));
    return;
  }
  if (HasIntegerZeros(w)) {
    const __m512i zeros = _mm512_loadu_si512(piece.zeros + cell);
    sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(zeros, _mm512_set1_epi32(x_sum)));
  }
  AddGroup(w, _mm512_cvtepi32_ps(sum), static_cast<float>(x_sum), scratch.scales + cell,
           scratch.offsets + cell, y);
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
__attribute__((noinline)) void MultiplyQuads(const QuadPiece& piece, const QuadTask& task,
                                             int64_t m) {
  const K16Weight& w = piece.panel.w;
  const int64_t stride = w.blocks * kIntegerRows;
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
    AddQuads<kTokens>(task.x + m * stride + at.begin * kRowsOfRun, stride,
                      piece.QuadsFrom(at.begin), (at.end - at.begin) * kQuadsOfRun, sums);
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

// y of a task by panels: multiply(piece) adds the sums of its groups to the scratch's.
template <int kBits, typename Task, typename Multiply>
void ForQuadPieces(const K16Weight& w, const Task& task, const float* x_scale, Multiply multiply) {
  const ScaledScratch scratch(task.scratch);
  alignas(64) int32_t zeros[kRunsOfPiece * kPanelColumns];
  const int64_t runs = QuadRuns(w);
  for (int64_t tile = task.tile_begin; tile < task.tile_end; tile += kPanelTiles) {
    const int64_t end = tile + kPanelTiles < task.tile_end ? tile + kPanelTiles : task.tile_end;
    const PanelOf panel = {w, tile, end - 1};
    std::memset(scratch.sums, 0, task.rows * kPanelColumns * sizeof(float));
    QuadPiece piece = {panel, scratch, zeros};
    for (int64_t run = 0; run < runs; run += kRunsOfPiece) {
      piece.begin = run;
      piece.end = run + kRunsOfPiece < runs ? run + kRunsOfPiece : runs;
      DecodeQuads<kBits>(panel, piece.begin, piece.end, scratch.panel);
      piece.LoadCellsOfGroups();
      multiply(piece);
    }
    StoreScaled(panel, x_scale, task, scratch);
  }
}

template <int kBits>
void ManyByQuads(const K16Weight& w, const QuadTask& task) {
  ForQuadPieces<kBits>(w, task, task.x_scale, [&](const QuadPiece& piece) {
    ForTokens(task.rows, [&](int64_t m, auto n) { MultiplyQuads<n.kValue>(piece, task, m); });
  });
}

void QuadProduct(const K16Weight& w, const QuadTask& task) {
  if (task.rows < LeastOfPanel(w)) return FewByQuads(w, task);
  if (w.bits == 8) return ManyByQuads<8>(w, task);
  ManyByQuads<4>(w, task);
}

}  // namespace
}  // namespace awqd::cpu
