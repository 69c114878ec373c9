// 16 floats in two AVX registers: the vector that the bodies are written over.
#pragma once

#include "kernels/cpu/bodies/vec_f16c.h"

namespace awqd::cpu {
namespace {

struct Vec {
  struct F {
    __m256 low, high;
  };
  static constexpr int kRows = 3;
  // Tiles of more sums than this leave no registers for tables and codes.
  static constexpr int kRoomySums = 2;
  static constexpr int kColumns = 2;
  // A decoded vector costs ten instructions here: several groups of rows share it through memory.
  static constexpr bool kUsePanel = true;
  static constexpr bool kUnroll = true;
  static constexpr int Columns(int) { return kColumns; }

  static F Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static F Load16Of(const void* in, Element type, int64_t index) {
    return {Load8(in, type, index), Load8(in, type, index + 8)};
  }
  static void Store(float* p, F v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
  }
  static F Fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static F Fms(F a, F b, F c) {
    return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
  }
  static F Sub(F a, F b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  static F Mul(F a, F b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static F Set(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
  static F Add(F a, F b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static F Abs(F v) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, v.low), _mm256_andnot_ps(sign, v.high)};
  }
  static F Max(F a, F b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
  // Halves folded onto each other, as AVX-512 does it.
  static float MaxOfAll(F v) {
    const __m256 of_8 = _mm256_max_ps(v.low, v.high);
    const __m128 of_4 = _mm_max_ps(_mm256_castps256_ps128(of_8), _mm256_extractf128_ps(of_8, 1));
    const __m128 of_2 = _mm_max_ps(of_4, _mm_movehl_ps(of_4, of_4));
    return _mm_cvtss_f32(_mm_max_ss(of_2, _mm_movehdup_ps(of_2)));
  }
  static float SumOfAll(F v) {
    const __m256 of_8 = _mm256_add_ps(v.low, v.high);
    const __m128 of_4 = _mm_add_ps(_mm256_castps256_ps128(of_8), _mm256_extractf128_ps(of_8, 1));
    const __m128 of_2 = _mm_add_ps(of_4, _mm_movehl_ps(of_4, of_4));
    return _mm_cvtss_f32(_mm_add_ss(of_2, _mm_movehdup_ps(of_2)));
  }
  static F RoundToHalf(F v) {
    return {_mm256_cvtph_ps(_mm256_cvtps_ph(v.low, _MM_FROUND_TO_NEAREST_INT)),
            _mm256_cvtph_ps(_mm256_cvtps_ph(v.high, _MM_FROUND_TO_NEAREST_INT))};
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

  // Entries 0..7 and 8..15 of a table: vpermps reads 3 index bits, a blend reads the fourth.
  static __m256 LookupHalf(F table, __m256i index, __m256i upper) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                            _mm256_permutevar8x32_ps(table.high, index),
                            _mm256_castsi256_ps(upper));
  }
  static __m256 LookupHalf(F table, const uint32_t* words, int shift) {
    const __m256i index = _mm256_srlv_epi32(Load32(words), _mm256_set1_epi32(shift));
    return LookupHalf(table, index, _mm256_slli_epi32(index, 28));
  }
  // table[words[i] >> shift], whose low 4 bits are the index.
  static F Lookup(F table, const uint32_t* words, int shift) {
    return {LookupHalf(table, words, shift), LookupHalf(table, words + 8, shift)};
  }
  template <int kShift>
  static __m256 LookupHalfAt(F table, const uint32_t* words) {
    const __m256i codes = Load32(words);
    return LookupHalf(table, _mm256_srli_epi32(codes, kShift),
                      _mm256_slli_epi32(codes, 28 - kShift));
  }
  template <int kShift>
  static F LookupAt(F table, const uint32_t* words) {
    return {LookupHalfAt<kShift>(table, words), LookupHalfAt<kShift>(table, words + 8)};
  }
  static __m256 MagicHalf(const uint32_t* words, int shift, int mask) {
    const __m256i codes = _mm256_srlv_epi32(Load32(words), _mm256_set1_epi32(shift));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(codes, _mm256_set1_epi32(mask)),
                                               _mm256_set1_epi32(0x4b000000)));
  }
  // 2^23 + (words[i] >> shift & mask).
  static F Magic(const uint32_t* words, int shift, int mask) {
    return {MagicHalf(words, shift, mask), MagicHalf(words + 8, shift, mask)};
  }
  static F Signed(const uint8_t* bytes) {
    const __m128i all = Load16(bytes);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
  }
  // The bytes have their upper bit flipped.
  static F Flipped(const uint8_t* bytes) {
    const __m128i all = FlipSigns(Load16(bytes));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)))};
  }
  // 2^-8 of each.
  static F E4m3(const uint8_t* bytes) {
    const __m256i halves = HalvesOfE4m3(Load16(bytes));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  }
  static void WidenLanes(const uint8_t* block, int bits, uint32_t* words) {
    for (int i = 0; i < 16; i += 8) {
      const __m256i low = bits == 1 ? _mm256_cvtepu8_epi32(Load8Bytes(block + i))
                                    : _mm256_cvtepu16_epi32(Load16(block + 2 * i));
      const __m256i high =
          bits == 3 ? _mm256_slli_epi32(_mm256_cvtepu8_epi32(Load8Bytes(block + 32 + i)), 16)
                    : _mm256_setzero_si256();
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i), _mm256_or_si256(low, high));
    }
  }

  static void Stream16(F v, Element type, void* out, int64_t index) {
    if (type == Element::kFp32) {
      _mm256_stream_ps(static_cast<float*>(out) + index, v.low);
      _mm256_stream_ps(static_cast<float*>(out) + index + 8, v.high);
      return;
    }
    _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + index),
                        _mm256_set_m128i(Round8(v.high, type), Round8(v.low, type)));
  }
  static void Stream32(F a, F b, Element type, void* out) {
    Stream16(a, type, out, 0);
    Stream16(b, type, out, 16);
  }
};

}  // namespace
}  // namespace awqd::cpu
