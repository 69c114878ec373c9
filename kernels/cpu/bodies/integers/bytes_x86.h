// What the ByteLanes of x86 share: the instructions of one width, and vectors of sums to one sum
// each. Everything has internal linkage.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/bodies/integers/eights.h"
#include "kernels/cpu/bodies/integers/times.h"

namespace awqd::cpu {
namespace {

// The widest vectors of the instruction set.
#if defined(__AVX512BW__)
struct Wide {
  using V = __m512i;
  static V Load(const void* p) { return _mm512_loadu_si512(p); }
  static V Zero() { return _mm512_setzero_si512(); }
  static V Low(V bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
  static V High(V bytes) { return Low(_mm512_srli_epi16(bytes, 4)); }
  static V Xor(V a, V b) { return _mm512_xor_si512(a, b); }
  static V FlipSigns(V bytes) { return Xor(bytes, _mm512_set1_epi8(static_cast<char>(0x80))); }
  static V MultiplyBytes(V codes, V x) { return _mm512_maddubs_epi16(codes, x); }
  static V Add16(V a, V b) { return _mm512_add_epi16(a, b); }
  static V Add32(V a, V b) { return _mm512_add_epi32(a, b); }
  static V Times256(V lanes) { return _mm512_slli_epi32(lanes, 8); }
  // The products of both 16-bit integers of each lane, added.
  static V MultiplyPairs(V a, V b) { return _mm512_madd_epi16(a, b); }
  static V Set16(int v) { return _mm512_set1_epi16(static_cast<int16_t>(v)); }
  // Half a vector of bytes.
  static V LoadWidened(const uint8_t* p) { return _mm512_cvtepu8_epi16(Load32(p)); }
};
#else
struct Wide {
  using V = __m256i;
  static V Load(const void* p) { return Load32(p); }
  static V Zero() { return _mm256_setzero_si256(); }
  static V Low(V bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
  static V High(V bytes) { return Low(_mm256_srli_epi16(bytes, 4)); }
  static V Xor(V a, V b) { return _mm256_xor_si256(a, b); }
  static V FlipSigns(V bytes) { return Xor(bytes, _mm256_set1_epi8(static_cast<char>(0x80))); }
  static V MultiplyBytes(V codes, V x) { return _mm256_maddubs_epi16(codes, x); }
  static V Add16(V a, V b) { return _mm256_add_epi16(a, b); }
  static V Add32(V a, V b) { return _mm256_add_epi32(a, b); }
  static V Times256(V lanes) { return _mm256_slli_epi32(lanes, 8); }
  // The products of both 16-bit integers of each lane, added.
  static V MultiplyPairs(V a, V b) { return _mm256_madd_epi16(a, b); }
  static V Set16(int v) { return _mm256_set1_epi16(static_cast<int16_t>(v)); }
  // Half a vector of bytes.
  static V LoadWidened(const uint8_t* p) { return _mm256_cvtepu8_epi16(Load16(p)); }
};
#endif

// The sum of the lanes of each of 8 vectors.
inline __m256i FoldLanes(const __m256i (&v)[8]) {
  // In each 128-bit lane the sums of four vectors.
  const __m256i low =
      _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
  const __m256i high =
      _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                          _mm256_permute2x128_si256(low, high, 0x31));
}

#if defined(__AVX512F__)
inline __m256i FoldLanes(const __m512i (&v)[8]) {
  __m256i halves[8];
  Times<8>([&](auto i) AWQD_ALWAYS_INLINE {
    halves[i] = _mm256_add_epi32(_mm512_castsi512_si256(v[i]), _mm512_extracti64x4_epi64(v[i], 1));
  });
  return FoldLanes(halves);
}
#endif

}  // namespace
}  // namespace awqd::cpu
