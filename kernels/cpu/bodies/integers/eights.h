// Eight: the columns of a tile, as 8 floats or 8 integers of 32 bits, of x86 or NEON. Everything
// has internal linkage.
#pragma once

#include <cstdint>

#include "kernels/cpu/bodies/bodies.h"

namespace awqd::cpu {
namespace {

#if defined(AWQD_NEON_BODY)
struct Eight {
  struct F {
    float32x4_t low, high;
  };
  struct I {
    int32x4_t low, high;
  };
  static F Set(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
  static F Load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static void Store(float* p, F v) {
    vst1q_f32(p, v.low);
    vst1q_f32(p + 4, v.high);
  }
  static F Sub(F a, F b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
  static F Mul(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
  // a * b + c.
  static F Fma(F a, F b, F c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }
  static F ToFloat(I v) { return {vcvtq_f32_s32(v.low), vcvtq_f32_s32(v.high)}; }

  static I LoadInts(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }
  static void StoreInts(int32_t* p, I v) {
    vst1q_s32(p, v.low);
    vst1q_s32(p + 4, v.high);
  }
  // Of integers.
  static I Rounded(F v) { return {vcvtnq_s32_f32(v.low), vcvtnq_s32_f32(v.high)}; }
  // sum - a * b.
  static I SubTimes(I sum, I a, int32_t b) {
    return {vmlsq_n_s32(sum.low, a.low, b), vmlsq_n_s32(sum.high, a.high, b)};
  }
  static I Plus(I sum, int32_t b) {
    return {vaddq_s32(sum.low, vdupq_n_s32(b)), vaddq_s32(sum.high, vdupq_n_s32(b))};
  }
};
#else
struct Eight {
  using F = __m256;
  using I = __m256i;
  static F Set(float v) { return _mm256_set1_ps(v); }
  static F Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  // a * b + c.
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F ToFloat(I v) { return _mm256_cvtepi32_ps(v); }

  static I LoadInts(const int32_t* p) { return Load32(p); }
  static void StoreInts(int32_t* p, I v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  // Of integers.
  static I Rounded(F v) { return _mm256_cvtps_epi32(v); }
  // sum - a * b.
  static I SubTimes(I sum, I a, int32_t b) {
    return _mm256_sub_epi32(sum, _mm256_mullo_epi32(a, _mm256_set1_epi32(b)));
  }
  static I Plus(I sum, int32_t b) { return _mm256_add_epi32(sum, _mm256_set1_epi32(b)); }
};
#endif

}  // namespace
}  // namespace awqd::cpu
