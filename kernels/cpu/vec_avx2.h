// 16 floats in two AVX registers: the vector that body.h is written over.
#pragma once

#include "kernels/cpu/vec_f16c.h"

namespace awqd::cpu {
namespace {

struct Vec {
  struct F {
    __m256 low, high;
  };
  // Entries 0..7 and 8..15: vpermps reads 3 index bits, a blend reads the fourth.
  struct Table {
    __m256 low, high;
  };
  static constexpr int kRows = 3;
  // Tiles of more sums than this leave no registers for tables and codes.
  static constexpr int kRoomySums = 2;
  static constexpr int kColumns = 2;
  // A decoded vector costs ten instructions here: several groups of rows share it through memory.
  static constexpr bool kUsePanel = true;
  static constexpr int Columns(int) { return kColumns; }

  static F Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void Store(float* p, F v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
  }
  static F Fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  using Part = __m256;
  static constexpr int kParts = 2;
  template <int kPart>
  static Part LoadPart(const float* p) {
    Part out = _mm256_loadu_ps(p + kPart * 8);
    // Otherwise the compiler loads it once for each of its uses, and loads are what is short.
    asm("" : "+x"(out));
    return out;
  }
  template <int kPart>
  static void FmaPart(Part a, Part b, F* c) {
    __m256& sum = kPart == 0 ? c->low : c->high;
    sum = _mm256_fmadd_ps(a, b, sum);
  }

  // out[i]: the lanes of v[i], halves folded onto each other four times. Writes whole vectors.
  template <int kCount>
  static void Sums(const F* v, float* out) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; i += 8) SumsOf8(v + i, kCount - i, out + i);
  }
  __attribute__((always_inline)) static void SumsOf8(const F* v, int count, float* out) {
    const auto at = [&](int i) {
      const F& f = v[i < count ? i : 0];
      return _mm256_add_ps(f.low, f.high);
    };
    // In quads[t]: [v[t] | v[4 + t]], 4 lanes each.
    __m256 quads[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      const __m256 a = at(t), b = at(4 + t);
      quads[t] = _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
    }
    const __m256 a = FoldPairs(quads[0], quads[1]), b = FoldPairs(quads[2], quads[3]);
    _mm256_storeu_ps(out,
                     _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)));
  }
  // In every half [a | b], 2 lanes each.
  static __m256 FoldPairs(__m256 a, __m256 b) {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_blend_pd(x, y, 0xa)),
                         _mm256_castpd_ps(_mm256_shuffle_pd(x, y, 0x5)));
  }

  static __m256 TableHalf(float first, float scale, float zero, bool round_to_half) {
    const __m256 q = _mm256_add_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_ps(first));
    const __m256 w = _mm256_mul_ps(_mm256_sub_ps(q, _mm256_set1_ps(zero)), _mm256_set1_ps(scale));
    return round_to_half ? _mm256_cvtph_ps(_mm256_cvtps_ph(w, _MM_FROUND_TO_NEAREST_INT)) : w;
  }
  static Table MakeTable(float scale, float zero, bool round_to_half) {
    return {TableHalf(0, scale, zero, round_to_half), TableHalf(8, scale, zero, round_to_half)};
  }
  // Tables of 8 columns.
  static void MakeTables(const float* scales, const uint8_t* zeros, bool round_to_half,
                         Table* tables) {
    for (int c = 0; c < 8; ++c) tables[c] = MakeTable(scales[c], zeros[c], round_to_half);
  }
  static __m256 LookupHalf(const Table& table, const uint32_t* words, int j) {
    const __m256i codes = _mm256_srl_epi32(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)), _mm_cvtsi32_si128(4 * j));
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, codes),
                            _mm256_permutevar8x32_ps(table.high, codes), upper);
  }
  static F Lookup(const Table& table, const uint32_t* words, int j) {
    return {LookupHalf(table, words, j), LookupHalf(table, words + 8, j)};
  }
  template <int kRun>
  static __m256 LookupHalfAt(const Table& table, const uint32_t* words) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    const __m256i index = _mm256_srli_epi32(codes, 4 * kRun);
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28 - 4 * kRun));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                            _mm256_permutevar8x32_ps(table.high, index), upper);
  }
  template <int kRun>
  static F LookupAt(const Table& table, const uint32_t* words) {
    return {LookupHalfAt<kRun>(table, words), LookupHalfAt<kRun>(table, words + 8)};
  }

  static __m256 WeightsHalf(const uint32_t* words, int j, const float* scales,
                            const float* magic_zeros) {
    const __m256i codes = _mm256_srl_epi32(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)), _mm_cvtsi32_si128(4 * j));
    const __m256i q = _mm256_or_si256(_mm256_and_si256(codes, _mm256_set1_epi32(15)),
                                      _mm256_set1_epi32(0x4b000000));
    return _mm256_mul_ps(_mm256_sub_ps(_mm256_castsi256_ps(q), _mm256_loadu_ps(magic_zeros)),
                         _mm256_loadu_ps(scales));
  }
  // (q - z) * s of 16 columns of one row; `magic_zeros` hold 2^23 + z.
  static F Weights(const uint32_t* words, int j, const float* scales, const float* magic_zeros) {
    return {WeightsHalf(words, j, scales, magic_zeros),
            WeightsHalf(words + 8, j, scales + 8, magic_zeros + 8)};
  }

  static __m256 Low(F v) { return v.low; }
  static __m256 High(F v) { return v.high; }

  static void Stream16(F v, Element type, void* out, int64_t index) {
    if (type == Element::kFp32) {
      _mm256_stream_ps(static_cast<float*>(out) + index, v.low);
      _mm256_stream_ps(static_cast<float*>(out) + index + 8, v.high);
      return;
    }
    const bool half = type == Element::kFp16;
    const __m128i low = half ? _mm256_cvtps_ph(v.low, _MM_FROUND_TO_NEAREST_INT) : ToBf16Of8(v.low);
    const __m128i high =
        half ? _mm256_cvtps_ph(v.high, _MM_FROUND_TO_NEAREST_INT) : ToBf16Of8(v.high);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + index),
                        _mm256_set_m128i(high, low));
  }
  static void Stream32(F a, F b, Element type, void* out) {
    Stream16(a, type, out, 0);
    Stream16(b, type, out, 16);
  }

  // out[i * stride + c] = in[c * 16 + i] for 8 columns of 16 words.
  static void Transpose(const uint32_t* in, uint32_t* out, int64_t stride) {
    TransposeTile(in, out, stride);
  }
};

}  // namespace
}  // namespace awqd::cpu
