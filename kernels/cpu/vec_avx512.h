// 16 floats in one AVX-512 register: the vector that body.h is written over.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/vec_f16c.h"

namespace awqd::cpu {
namespace {

struct Vec {
  using F = __m512;
  // One 16-entry table: vpermps reads the low 4 bits of each index and ignores the rest.
  using Table = __m512;
  // Tiles of accumulators that leave registers for the decoded weights and one row of x.
  static constexpr int kRows = 6;
  static constexpr int kColumns = 4;
  // Shifts and permutations compete with FMAs for a port: beyond one group of rows it is faster to
  // decode once (256 rows, Zen 4, 2026-11-21: 106 against 85 GFLOP/s on a core).
  static constexpr bool kUsePanel = true;

  static F Zero() { return _mm512_setzero_ps(); }
  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static float Sum(F v) {
    return SumOf8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
  }

  static Table MakeTable(float scale, float zero, bool round_to_half) {
    const __m512 q = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 w = _mm512_mul_ps(_mm512_sub_ps(q, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
    return round_to_half ? _mm512_cvtph_ps(_mm512_cvtps_ph(w, _MM_FROUND_TO_NEAREST_INT)) : w;
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
