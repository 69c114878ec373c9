// What the ByteLanes of x86 share: vectors of sums to one sum each. Everything has internal
// linkage.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/bodies/eights.h"
#include "kernels/cpu/bodies/times.h"

namespace awqd::cpu {
namespace {

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
