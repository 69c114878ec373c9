// 16 floats in one AVX-512 register: the vector that body.h is written over.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/vec_f16c.h"

namespace awqd::cpu {
namespace {

// values[255 - z + q] is q - z.
struct Ramp {
  float values[255 + 16] = {};
  constexpr Ramp() {
    for (int i = 0; i < 255 + 16; ++i) values[i] = static_cast<float>(i - 255);
  }
};
alignas(64) constexpr Ramp kRamp;

struct Vec {
  using F = __m512;
  // One 16-entry table: vpermps reads the low 4 bits of each index and ignores the rest.
  using Table = __m512;
  // Tiles of accumulators that leave registers for the decoded weights and one row of x.
  static constexpr int kRows = 6;
  // Tiles of more sums than this leave no registers for tables and codes.
  static constexpr int kRoomySums = 16;
  static constexpr int kColumns = 4;
  // A shift and a permutation next to four FMAs cost nothing (Zen 4, measured): every group of rows
  // decodes for itself.
  static constexpr bool kUsePanel = false;
  static constexpr int Columns(int rows) { return rows <= 3 ? 8 : kColumns; }

  static F Zero() { return _mm512_setzero_ps(); }
  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  // out[i]: the lanes of v[i], halves folded onto each other four times. Writes whole vectors.
  template <int kCount>
  static void Sums(const F* v, float* out) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; i += 16) SumsOf16(v + i, kCount - i, out + i);
  }
  // Each fold serves two vectors, or the two halves of what four, eight, sixteen have become.
  static __attribute__((always_inline)) void SumsOf16(const F* v, int count, float* out) {
    const auto at = [&](int i) { return v[i < count ? i : 0]; };
    F quads[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      quads[t] = FoldQuads(FoldHalves(at(t), at(4 + t)), FoldHalves(at(8 + t), at(12 + t)));
    }
    const F a = FoldPairs(quads[0], quads[1]), b = FoldPairs(quads[2], quads[3]);
    const F sums = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    _mm512_storeu_ps(out, sums);
  }
  // [a | b], 8 lanes each.
  static F FoldHalves(F a, F b) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
  }
  // [low half of a | high half of a | ... of b], 4 lanes each.
  static F FoldQuads(F a, F b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  // In every quarter [a | b], 2 lanes each.
  static F FoldPairs(F a, F b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_mask_blend_pd(0xaa, x, y)),
                         _mm512_castpd_ps(_mm512_shuffle_pd(x, y, 0x55)));
  }

  static Table MakeTable(float scale, float zero, bool round_to_half) {
    const __m512 q = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 w = _mm512_mul_ps(_mm512_sub_ps(q, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
    return round_to_half ? _mm512_cvtph_ps(_mm512_cvtps_ph(w, _MM_FROUND_TO_NEAREST_INT)) : w;
  }
  // Tables of 8 columns.
  static void MakeTables(const float* scales, const uint8_t* zeros, bool round_to_half,
                         Table* tables) {
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(scales));
    const int ordinary = _mm256_cmp_ps_mask(size, _mm256_set1_ps(0x1p-14f), _CMP_GE_OQ) &
                         _mm256_cmp_ps_mask(size, _mm256_set1_ps(128), _CMP_LE_OQ);
    if (!round_to_half || ordinary != 0xff) {
      for (int c = 0; c < 8; ++c) tables[c] = MakeTable(scales[c], zeros[c], round_to_half);
      return;
    }
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      const __m512 q_minus_zero = _mm512_loadu_ps(kRamp.values + 255 - zeros[c]);
      const __m512 w = _mm512_mul_ps(q_minus_zero, _mm512_set1_ps(scales[c]));
      // Veltkamp's splitting: to 11 bits, which are all of a normal half; the conversions take
      // twice as long. Ties go to even, because w has at most 19 bits.
      __m512 spread = _mm512_mul_ps(w, _mm512_set1_ps(8193));
      // Otherwise the compiler contracts product and difference, which then round nothing.
      asm("" : "+v"(spread));
      tables[c] = _mm512_sub_ps(spread, _mm512_sub_ps(spread, w));
    }
  }
  // Weights of run `j` of a block of words.
  static F Lookup(const Table& table, const uint32_t* words, int j) {
    const __m512i codes = _mm512_loadu_si512(words);
    return _mm512_permutexvar_ps(_mm512_srl_epi32(codes, _mm_cvtsi32_si128(4 * j)), table);
  }
  template <int kRun>
  static F LookupAt(const Table& table, const uint32_t* words) {
    const __m512i codes = _mm512_loadu_si512(words);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * kRun), table);
  }

  // (q - z) * s of 16 columns of one row; `magic_zeros` hold 2^23 + z.
  static F Weights(const uint32_t* words, int j, const float* scales, const float* magic_zeros) {
    const __m512i codes = _mm512_srl_epi32(_mm512_loadu_si512(words), _mm_cvtsi32_si128(4 * j));
    // (codes & 15) | bits of 2^23, in one instruction.
    const __m512i q = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(15),
                                                _mm512_set1_epi32(0x4b000000), 0xea);
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_castsi512_ps(q), _mm512_loadu_ps(magic_zeros)),
                         _mm512_loadu_ps(scales));
  }

  static __m256 Low(F v) { return _mm512_castps512_ps256(v); }
  static __m256 High(F v) { return _mm512_extractf32x8_ps(v, 1); }

  static void Stream32(F a, F b, Element type, void* out) {
    if (type == Element::kFp32) {
      _mm512_stream_ps(static_cast<float*>(out), a);
      _mm512_stream_ps(static_cast<float*>(out) + 16, b);
      return;
    }
    __m512i bits;
    if (type == Element::kFp16) {
      bits = Join(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT),
                  _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
    } else {
      bits = Join(ToBf16(a), ToBf16(b));
    }
    _mm512_stream_si512(static_cast<__m512i*>(out), bits);
  }

  static __m512i Join(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  static __m256i ToBf16(F v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
  }

  // out[i * stride + c] = in[c * 16 + i] for 8 columns of 16 words.
  static void Transpose(const uint32_t* in, uint32_t* out, int64_t stride) {
    TransposeTile(in, out, stride);
  }
};

}  // namespace
}  // namespace awqd::cpu
