// 16 floats in one AVX-512 register: the vector that the bodies are written over.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/bodies/vec_f16c.h"

namespace awqd::cpu {
namespace {

// sums + the products of both 16-bit integers of each lane, modulo 2^32.
inline __m512i AddMultiplied(__m512i sums, __m512i a, __m512i b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, a, b);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
}

struct Vec {
  using F = __m512;
  // Tiles of accumulators that leave registers for the decoded weights and one row of x.
  static constexpr int kRows = 6;
  // Tiles of more sums than this leave no registers for tables and codes.
  static constexpr int kRoomySums = 16;
  static constexpr int kColumns = 4;
  // A shift and a permutation next to four FMAs cost nothing (Zen 4, measured): every group of rows
  // decodes for itself.
  static constexpr bool kUsePanel = false;
  static constexpr bool kUnroll = true;
  static constexpr int Columns(int rows) { return rows <= 3 ? 8 : kColumns; }

  static F Zero() { return _mm512_setzero_ps(); }
  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static F Load16Of(const void* in, Element type, int64_t index) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(Load8(in, type, index)),
                              Load8(in, type, index + 8), 1);
  }
  static void Store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F Fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Set(float v) { return _mm512_set1_ps(v); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Abs(F v) { return _mm512_abs_ps(v); }
  static F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static float MaxOfAll(F v) { return _mm512_reduce_max_ps(v); }
  static float SumOfAll(F v) { return _mm512_reduce_add_ps(v); }
  static F RoundToHalf(F v) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
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

  // table[words[i] >> shift], where vpermps reads the low 4 bits of an index and ignores the rest.
  static F Lookup(F table, const uint32_t* words, int shift) {
    const __m512i codes = _mm512_loadu_si512(words);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(codes, _mm512_set1_epi32(shift)), table);
  }
  template <int kShift>
  static F LookupAt(F table, const uint32_t* words) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(words), kShift), table);
  }
  // 2^23 + (words[i] >> shift & mask).
  static F Magic(const uint32_t* words, int shift, int mask) {
    const __m512i codes = _mm512_srlv_epi32(_mm512_loadu_si512(words), _mm512_set1_epi32(shift));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_and_si512(codes, _mm512_set1_epi32(mask)),
                                               _mm512_set1_epi32(0x4b000000)));
  }
  static F Signed(const uint8_t* bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(Load16(bytes)));
  }
  // The bytes have their upper bit flipped.
  static F Flipped(const uint8_t* bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(FlipSigns(Load16(bytes))));
  }
  // 2^-8 of each.
  static F E4m3(const uint8_t* bytes) { return _mm512_cvtph_ps(HalvesOfE4m3(Load16(bytes))); }
  static void WidenLanes(const uint8_t* block, int bits, uint32_t* words) {
    const __m512i low =
        bits == 1 ? _mm512_cvtepu8_epi32(Load16(block)) : _mm512_cvtepu16_epi32(Load32(block));
    const __m512i high = bits == 3 ? _mm512_slli_epi32(_mm512_cvtepu8_epi32(Load16(block + 32)), 16)
                                   : _mm512_setzero_si512();
    _mm512_storeu_si512(words, _mm512_or_si512(low, high));
  }

  static void Stream32(F a, F b, Element type, void* out) {
    if (type == Element::kFp32) {
      _mm512_stream_ps(static_cast<float*>(out), a);
      _mm512_stream_ps(static_cast<float*>(out) + 16, b);
      return;
    }
    _mm512_stream_si512(static_cast<__m512i*>(out), Round(a, b, type));
  }

  // To 16 bits, `low` before `high`.
  static __m512i Round(F low, F high, Element type) {
    const auto round = [type](F v) {
      return type == Element::kFp16 ? _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : ToBf16(v);
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(round(low)), round(high), 1);
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
};

}  // namespace
}  // namespace awqd::cpu
