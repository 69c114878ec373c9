// FP16 and BF16 activations as 16-bit integers: blocks of 128 rows of a token, each with a power of
// two of its own, x ~ step * q.
//
// A value that has all its bits within the 15 topmost of its block is exact, among them every FP16
// number of a sixteenth of the greatest or more. Others are rounded to a step of at most 2^-14 of
// the greatest. A token whose block holds one that dwarfs the others (kMostSpread) is not taken.
//
// Included by the bodies for AVX-512 VNNI, behind their Vec and register_tile.h; everything has
// internal linkage.
#pragma once

#include <cstring>

#include "kernels/cpu/bodies/register_tile.h"

namespace awqd::cpu {
namespace {

// The most that |x| of a block may be times its mean. The step is then at most 1/512 of the mean,
// where FP16 rounds a value of that size to 1/1024 of it or less.
constexpr float kMostSpread = 32;
// The greatest |q|: the upper of its digits is 127 (digits_body.h).
constexpr float kMostInteger = 32512;

// 16 elements from `index`, of which the first `count` are read; 0 for the others.
inline __m512 LoadSome(const uint16_t* in, Element type, int64_t index, int64_t count) {
  const auto mask = static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
  const __m256i bits = _mm256_maskz_loadu_epi16(mask, in + index);
  if (type == Element::kFp16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// The power of two that is at least `v`, a positive normal number.
inline float PowerOfTwoFrom(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  bits = (bits + 0x7fffff) & 0xff800000;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}

// Rows 16 i .. 16 i + 15 of a block in q[i].
struct BlockIntegers {
  __m512i q[8];
  float step = 0;

  // Of rows [first, first + 128) of a token, of which those from w.k on are 0. False where the
  // token is not taken: it holds a NaN or an infinity, values below 2^-96, or one that dwarfs the
  // others of its block.
  bool Make(const K16Weight& w, const void* x, Element type, int64_t first) {
    const int64_t count = w.k - first < kIntegerRows ? w.k - first : kIntegerRows;
    __m512 values[8], greatest = _mm512_setzero_ps(), total = _mm512_setzero_ps();
    for (int i = 0; i < 8; ++i) {
      const int64_t left = count - 16 * i;
      values[i] = left <= 0 ? _mm512_setzero_ps()
                            : LoadSome(static_cast<const uint16_t*>(x), type, first + 16 * i, left);
      const __m512 size = _mm512_abs_ps(values[i]);
      greatest = _mm512_max_ps(greatest, size);
      total = _mm512_add_ps(total, size);
    }
    const float most = _mm512_reduce_max_ps(greatest), sum = _mm512_reduce_add_ps(total);
    if (sum == 0) {
      step = 0;
      for (__m512i& lanes : q) lanes = _mm512_setzero_si512();
      return true;
    }
    // A NaN, or a sum that is infinite, fails the second comparison.
    if (!(most >= 0x1p-96f) || !(sum <= 0x1p120f)) return false;
    if (most * static_cast<float>(count) > kMostSpread * sum) return false;
    step = PowerOfTwoFrom(most * (1 / kMostInteger));
    for (int i = 0; i < 8; ++i) {
      q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], _mm512_set1_ps(1 / step)));
    }
    return true;
  }

  int32_t Sum() const {
    __m512i sum = q[0];
    for (int i = 1; i < 8; ++i) sum = _mm512_add_epi32(sum, q[i]);
    return _mm512_reduce_add_epi32(sum);
  }
};

}  // namespace
}  // namespace awqd::cpu
