// Shared by the AVX2 and AVX-512 bodies: 8 lanes with F16C. Everything has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/bodies/bodies.h"

namespace awqd::cpu {
namespace {

inline __m128i Load8Bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline __m128i Load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256i Load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline __m128i FlipSigns(__m128i bytes) {
  return _mm_xor_si128(bytes, _mm_set1_epi8(static_cast<char>(0x80)));
}

// 16 codes of E4M3 as FP16 values of 2^-8 of theirs: the exponent's bias differs by 8. A subnormal
// code becomes a subnormal half, exactly.
inline __m256i HalvesOfE4m3(__m128i codes) {
  // The sign at bits 15 and up, exponent and mantissa at bits 7 to 13.
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  const __m256i halves = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  // NaN, all ones, alone carries into bit 14, which makes it a NaN again.
  const __m256i carry = _mm256_add_epi16(halves, _mm256_set1_epi16(0x80));
  return _mm256_or_si256(halves, _mm256_and_si256(carry, _mm256_set1_epi16(0x4000)));
}

// Whether 8 scales are such that products with integers below 256 are normal halves.
inline bool Ordinary(const float* scales) {
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(scales));
  const __m256 fits = _mm256_and_ps(_mm256_cmp_ps(size, _mm256_set1_ps(0x1p-14f), _CMP_GE_OQ),
                                    _mm256_cmp_ps(size, _mm256_set1_ps(128), _CMP_LE_OQ));
  return _mm256_movemask_ps(fits) == 0xff;
}

inline __m256 Load8(const void* in, Element type, int64_t index) {
  if (type == Element::kFp32) return _mm256_loadu_ps(static_cast<const float*>(in) + index);
  const __m128i bits =
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(in) + index));
  if (type == Element::kFp16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Round to nearest even; NaNs become quiet.
inline __m128i ToBf16Of8(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const __m256i high =
      _mm256_srli_epi32(_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                                             _mm256_castsi256_ps(quiet), nan)),
                        16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

// To 16 bits.
inline __m128i Round8(__m256 v, Element type) {
  return type == Element::kFp16 ? _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : ToBf16Of8(v);
}

inline void Store8(void* out, Element type, int64_t index, __m256 v) {
  if (type == Element::kFp32) {
    _mm256_storeu_ps(static_cast<float*>(out) + index, v);
    return;
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + index),
                   Round8(v, type));
}

inline void Zeros8(const uint8_t* in, float* out) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in));
  _mm256_storeu_ps(out, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)));
}

inline void Transpose8x8(const uint32_t* in, uint32_t* out, int64_t stride) {
  __m256 r[8], s[8];
  for (int c = 0; c < 8; ++c) r[c] = _mm256_loadu_ps(reinterpret_cast<const float*>(in + c * 16));
  for (int c = 0; c < 8; c += 2) {
    s[c] = _mm256_unpacklo_ps(r[c], r[c + 1]);
    s[c + 1] = _mm256_unpackhi_ps(r[c], r[c + 1]);
  }
  for (int c = 0; c < 8; c += 4) {
    r[c] = _mm256_shuffle_ps(s[c], s[c + 2], 0x44);
    r[c + 1] = _mm256_shuffle_ps(s[c], s[c + 2], 0xee);
    r[c + 2] = _mm256_shuffle_ps(s[c + 1], s[c + 3], 0x44);
    r[c + 3] = _mm256_shuffle_ps(s[c + 1], s[c + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    float* low = reinterpret_cast<float*>(out + i * stride);
    float* high = reinterpret_cast<float*>(out + (i + 4) * stride);
    _mm256_storeu_ps(low, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(high, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

// out[i * stride + c] = in[c * 16 + i] for 8 columns of 16 words.
inline void TransposeTile(const uint32_t* in, uint32_t* out, int64_t stride) {
  Transpose8x8(in, out, stride);
  Transpose8x8(in + 8, out + 8 * stride, stride);
}

// out[i * stride + c] = in[c * in_stride + i] for 8 columns of 16 bytes.
inline void TransposeTileOfBytes(const uint8_t* in, int64_t in_stride, uint8_t* out,
                                 int64_t stride) {
  const auto column = [&](int c) { return Load16(in + c * in_stride); };
  for (int half = 0; half < 2; ++half) {
    // Rows 8 half .. 8 half + 7 of two columns.
    const auto pair = [&](int c) {
      return half == 0 ? _mm_unpacklo_epi8(column(c), column(c + 1))
                       : _mm_unpackhi_epi8(column(c), column(c + 1));
    };
    const __m128i a = pair(0), b = pair(2), c = pair(4), d = pair(6);
    const __m128i low[2] = {_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)};
    const __m128i high[2] = {_mm_unpacklo_epi16(c, d), _mm_unpackhi_epi16(c, d)};
    for (int quarter = 0; quarter < 2; ++quarter) {
      uint8_t* to = out + (half * 8 + quarter * 4) * stride;
      const __m128i rows[2] = {_mm_unpacklo_epi32(low[quarter], high[quarter]),
                               _mm_unpackhi_epi32(low[quarter], high[quarter])};
      for (int i = 0; i < 2; ++i) {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 2 * i * stride), rows[i]);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + (2 * i + 1) * stride),
                         _mm_unpackhi_epi64(rows[i], rows[i]));
      }
    }
  }
}

// Makes streaming stores visible before another thread is told that they are done.
inline void StreamFence() { _mm_sfence(); }

// One element, through the vector conversions so that every element rounds alike.
inline float Load1(const void* in, Element type, int64_t index) {
  if (type == Element::kFp32) return static_cast<const float*>(in)[index];
  const uint16_t bits = static_cast<const uint16_t*>(in)[index];
  if (type == Element::kFp16) return _cvtsh_ss(bits);
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits) << 16)));
}

inline void Store1(void* out, Element type, int64_t index, float value) {
  if (type == Element::kFp32) {
    static_cast<float*>(out)[index] = value;
    return;
  }
  const __m128i bits = Round8(_mm256_set1_ps(value), type);
  static_cast<uint16_t*>(out)[index] = static_cast<uint16_t>(_mm_cvtsi128_si32(bits));
}

// 8 floats from memory, added and stored with one rounding.
inline void Store8Plus(void* out, Element type, int64_t index, const float* v, const float* bias) {
  // As they were written: a load of what two stores left waits for both.
  __m256 sum = _mm256_set_m128(_mm_loadu_ps(v + 4), _mm_loadu_ps(v));
  if (bias != nullptr) sum = _mm256_add_ps(sum, _mm256_loadu_ps(bias));
  Store8(out, type, index, sum);
}

inline void Load8To(const void* in, Element type, int64_t index, float* out) {
  _mm256_storeu_ps(out, Load8(in, type, index));
}

}  // namespace
}  // namespace awqd::cpu
