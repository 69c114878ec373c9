// What the AVX2 and AVX-512 bodies share: 8 lanes with F16C. Everything has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/bodies.h"

namespace awqd::cpu {
namespace {

// Halves are folded onto each other; every body adds in this order.
inline float SumOf8(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
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

inline void Store8(void* out, Element type, int64_t index, __m256 v) {
  if (type == Element::kFp32) {
    _mm256_storeu_ps(static_cast<float*>(out) + index, v);
    return;
  }
  const __m128i bits =
      type == Element::kFp16 ? _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : ToBf16Of8(v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + index), bits);
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
  const __m256 v = _mm256_set1_ps(value);
  const __m128i bits =
      type == Element::kFp16 ? _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : ToBf16Of8(v);
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
