// Decoding to 16 bits with AVX-512. Everything has internal linkage.
//
// Computes: weights of codes of up to 4 bits by look-up: the 16 rounded weights of a group and
// column, of two columns at a time, fill one register that vpermw reads by 5 index bits.
// Converting each weight instead costs 1.6 times as much for FP16 and twice for BF16 (Zen 4,
// 2026-11-21: 14 and 10 against 22 GB/s into the L2 cache).
// Weight layout: k16. Work split: 32 columns of a run of 16 rows become 16 registers of column
// pairs, which a transposition turns into 16 whole cache lines.
#pragma once

#include "kernels/cpu/bodies/dequantize_body.h"

namespace awqd::cpu {
namespace {

constexpr int64_t kPairs = kChunk / 2;  // of columns
constexpr int64_t kLinePairs = 16;      // of a cache line of the result

struct PairChunk {
  // Runs 0..3 and 4..7 of a block: 32-bit lane i holds rows 16 j + i, j-th code from below, of the
  // pair's columns in its halves.
  __m512i codes[2][kPairs];
  __m512i tables[kPairs];
};

inline void LoadPairs(const K16Weight& w, const DequantizeTask& task, int64_t pairs,
                      PairChunk* chunk) {
  const __m512i low = _mm512_set1_epi32(0xffff);
  const __m128i four = _mm_cvtsi32_si128(4 * w.bits);
  alignas(64) uint32_t spare[8 * 16];
  for (int64_t t = 0; t < pairs / 4; ++t) {
    const int64_t tile = task.col_begin / 8 + t;
    const uint32_t* lanes =
        LanesOf(w, w.codes + (tile * w.blocks + task.block) * 8 * w.block_bytes, spare);
    for (int64_t p = 0; p < 4; ++p) {
      const __m512i even = _mm512_loadu_si512(lanes + 32 * p);
      const __m512i odd = _mm512_loadu_si512(lanes + 32 * p + 16);
      // Bits of the first operand where `low` is set, else of the second.
      chunk->codes[0][4 * t + p] =
          _mm512_ternarylogic_epi32(low, even, _mm512_slli_epi32(odd, 16), 0xca);
      chunk->codes[1][4 * t + p] =
          _mm512_ternarylogic_epi32(low, _mm512_srl_epi32(even, four),
                                    _mm512_slli_epi32(_mm512_srl_epi32(odd, four), 16), 0xca);
    }
  }
}

inline void MakePairTables(const K16Weight& w, const DequantizeTask& task, int64_t pairs,
                           int64_t group, PairChunk* chunk) {
  for (int64_t p = 0; p < pairs; p += 4) {
    const int64_t tile = task.col_begin / 8 + p / 4;
    float scales[8], zeros[8];
    LoadCells(w, tile, group, scales, zeros);
    Vec::F tables[8];
    ExactTables(w, scales, zeros, tables);
    if (w.outer != nullptr) {
      for (int c = 0; c < 8; ++c) {
        tables[c] = Vec::Mul(tables[c], Vec::Set(w.outer[tile * 8 + c]));
      }
    }
    for (int c = 0; c < 8; c += 2) {
      const auto round = [&](const Vec::F& v) { return (__m256i)RoundTo(task.out_type, v.r[0]); };
      chunk->tables[p + c / 2] =
          _mm512_inserti64x4(_mm512_castsi256_si512(round(tables[c])), round(tables[c + 1]), 1);
    }
  }
}

// Lane i of r[c] <-> lane c of r[i].
inline void Transpose16x16(__m512i r[16]) {
  __m512i s[16];
#pragma GCC unroll 16
  for (int c = 0; c < 16; c += 2) {
    s[c] = _mm512_unpacklo_epi32(r[c], r[c + 1]);
    s[c + 1] = _mm512_unpackhi_epi32(r[c], r[c + 1]);
  }
  // Now r[c + q] holds lanes q, 4 + q, 8 + q and 12 + q of columns c .. c + 3.
#pragma GCC unroll 16
  for (int c = 0; c < 16; c += 4) {
    r[c] = _mm512_unpacklo_epi64(s[c], s[c + 2]);
    r[c + 1] = _mm512_unpackhi_epi64(s[c], s[c + 2]);
    r[c + 2] = _mm512_unpacklo_epi64(s[c + 1], s[c + 3]);
    r[c + 3] = _mm512_unpackhi_epi64(s[c + 1], s[c + 3]);
  }
#pragma GCC unroll 16
  for (int q = 0; q < 4; ++q) {
    s[q] = _mm512_shuffle_i32x4(r[q], r[q + 4], 0x44);
    s[q + 4] = _mm512_shuffle_i32x4(r[q], r[q + 4], 0xee);
    s[q + 8] = _mm512_shuffle_i32x4(r[q + 8], r[q + 12], 0x44);
    s[q + 12] = _mm512_shuffle_i32x4(r[q + 8], r[q + 12], 0xee);
  }
#pragma GCC unroll 16
  for (int q = 0; q < 4; ++q) {
    r[q] = _mm512_shuffle_i32x4(s[q], s[q + 8], 0x88);
    r[q + 4] = _mm512_shuffle_i32x4(s[q], s[q + 8], 0xdd);
    r[q + 8] = _mm512_shuffle_i32x4(s[q + 4], s[q + 12], 0x88);
    r[q + 12] = _mm512_shuffle_i32x4(s[q + 4], s[q + 12], 0xdd);
  }
}

// 16 rows of 32 columns; row_bytes from one row to the next. `shift`: of the run's codes.
inline void EmitLines(const __m512i* codes, const __m512i* tables, __m512i shift, bool stream,
                      int64_t row_bytes, char* out) {
  __m512i r[16];
#pragma GCC unroll 16
  for (int p = 0; p < kLinePairs; ++p) {
    // (codes & mask) | bit, which sends odd columns to the upper half of the table.
    const __m512i index =
        _mm512_ternarylogic_epi32(_mm512_srlv_epi32(codes[p], shift), _mm512_set1_epi32(0x000f000f),
                                  _mm512_set1_epi32(0x100000), 0xea);
    r[p] = _mm512_permutexvar_epi16(index, tables[p]);
  }
  Transpose16x16(r);
  if (stream) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i * row_bytes), r[i]);
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * row_bytes, r[i]);
  }
}

// Whole runs, `pairs` a multiple of kLinePairs.
void DequantizePairs(const K16Weight& w, const DequantizeTask& task, int64_t pairs) {
  PairChunk chunk;
  LoadPairs(w, task, pairs, &chunk);
  const int64_t row_bytes = task.out_stride * 2, tile_bytes = 8 * w.block_bytes;
  const bool aligned = (reinterpret_cast<uintptr_t>(task.out) | row_bytes) % 64 == 0;
  const bool stream = task.stream && aligned;
  const uint8_t* next = w.codes + (task.col_begin / 8 * w.blocks + task.block + 1) * tile_bytes;
  const int64_t run_bytes = tile_bytes / 8;
  int64_t group = -1;
  for (int64_t row = task.row_begin; row < task.row_end; row += 16) {
    if (row / w.group_size != group) {
      group = row / w.group_size;
      MakePairTables(w, task, pairs, group, &chunk);
    }
    const int64_t run = row / 16 % 8;
    const __m512i shift = _mm512_set1_epi32(static_cast<int>(run % 4) * w.bits);
    char* out = static_cast<char*>(task.out) + (row - task.row_begin) * row_bytes;
    // A line of each tile's next block: hardware prefetchers do not foresee them, and asking for
    // all at once holds up what is needed now.
    const uint8_t* ahead = next + run * run_bytes;
    for (int64_t p = 0; p < pairs; p += kLinePairs) {
      for (int t = 0; t < 4; ++t, ahead += w.blocks * tile_bytes) __builtin_prefetch(ahead, 0, 2);
      EmitLines(chunk.codes[run / 4] + p, chunk.tables + p, shift, stream, row_bytes, out + p * 4);
    }
  }
}

void DequantizeFast(const K16Weight& w, const DequantizeTask& task) {
  const bool runs = w.group_size % 16 == 0 && task.row_begin % 16 == 0 && task.row_end % 16 == 0;
  DequantizeTask rest = task;
  if (runs && w.bits <= 4 && task.out_type != Element::kFp32 && task.col_begin % 8 == 0) {
    const int64_t pairs = (task.col_end - task.col_begin) / 2 / kLinePairs * kLinePairs;
    DequantizePairs(w, task, pairs);
    rest.col_begin += pairs * 2;
    rest.out = static_cast<char*>(rest.out) + pairs * 4;
  }
  if (rest.col_begin < rest.col_end) return Dequantize(w, rest);
  if (task.stream) StreamFence();
}

}  // namespace
}  // namespace awqd::cpu
