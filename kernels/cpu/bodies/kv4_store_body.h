// KV4 by rows: ranges and codes of elements. Everything has internal linkage, or is inlined
// everywhere (kv4_math.h).
//
// Written over a register of floats. Where the compiler is left to vectorise CodeOf, it takes three
// times as long (GCC 12).
#pragma once

#include <cstdint>

#include "kernels/cpu/bodies/vec.h"
#include "kernels/kv4_math.h"

namespace awqd::cpu {
namespace {

#if defined(__AVX512BW__)

// Floats of one register, and what becomes of them.
struct Kv4Lanes {
  static constexpr int64_t kCount = 16;
  __m512 v;

  static Kv4Lanes Set(float value) { return {_mm512_set1_ps(value)}; }
  static Kv4Lanes Load(const void* x, Element type, int64_t index) {
    if (type == Element::kFp32) return {_mm512_loadu_ps(static_cast<const float*>(x) + index)};
    const __m256i bits = Load32(static_cast<const uint16_t*>(x) + index);
    if (type == Element::kFp16) return {_mm512_cvtph_ps(bits)};
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  // As kv4::Smaller and kv4::Larger.
  static Kv4Lanes Smaller(Kv4Lanes a, Kv4Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
  static Kv4Lanes Larger(Kv4Lanes a, Kv4Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
  // Over all lanes, none of which is a NaN.
  float Least() const { return _mm512_reduce_min_ps(v); }
  float Greatest() const { return _mm512_reduce_max_ps(v); }

  // Codes of 16 elements, as kv4::CodeOf makes them, in 8 bytes.
  static void StoreCodes(const Kv4Lanes (&x)[1], Kv4Lanes inverse, Kv4Lanes zero, uint8_t* codes) {
    const __m512 real = _mm512_add_ps(_mm512_mul_ps(x[0].v, inverse.v), zero.v);
    const __m512 within =
        _mm512_min_ps(_mm512_max_ps(real, _mm512_setzero_ps()), _mm512_set1_ps(15));
    const __m512i each = _mm512_cvtps_epi32(within);
    const __m512i pairs = _mm512_or_si512(each, _mm512_srli_epi64(each, 28));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi64_epi8(pairs));
  }
  static constexpr int64_t kAtOnce = 1;  // of a StoreCodes
};

#elif defined(__AVX2__)

// Floats of one register, and what becomes of them.
struct Kv4Lanes {
  static constexpr int64_t kCount = 8;
  __m256 v;

  static Kv4Lanes Set(float value) { return {_mm256_set1_ps(value)}; }
  static Kv4Lanes Load(const void* x, Element type, int64_t index) {
    return {Load8(x, type, index)};
  }
  // As kv4::Smaller and kv4::Larger.
  static Kv4Lanes Smaller(Kv4Lanes a, Kv4Lanes b) { return {_mm256_min_ps(a.v, b.v)}; }
  static Kv4Lanes Larger(Kv4Lanes a, Kv4Lanes b) { return {_mm256_max_ps(a.v, b.v)}; }
  // Over all lanes, none of which is a NaN.
  float Least() const {
    __m128 m = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_min_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_min_ss(m, _mm_movehdup_ps(m)));
  }
  float Greatest() const {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }

  static __m256i Codes(__m256 x, __m256 inverse, __m256 zero) {
    const __m256 real = _mm256_add_ps(_mm256_mul_ps(x, inverse), zero);
    const __m256 within =
        _mm256_min_ps(_mm256_max_ps(real, _mm256_setzero_ps()), _mm256_set1_ps(15));
    return _mm256_cvtps_epi32(within);
  }
  // Codes of 32 elements, as kv4::CodeOf makes them, in 16 bytes.
  static void StoreCodes(const Kv4Lanes (&x)[4], Kv4Lanes inverse, Kv4Lanes zero, uint8_t* codes) {
    __m256i each[4];
    for (int i = 0; i < 4; ++i) each[i] = Codes(x[i].v, inverse.v, zero.v);
    // Neighbours a, b become a + 16 b. Packing works on halves of registers: elements 0 to 3 of
    // all four stay in the lower half, elements 4 to 7 in the upper.
    const __m256i weights = _mm256_set1_epi32(16 << 16 | 1);
    const __m256i first = _mm256_madd_epi16(_mm256_packus_epi32(each[0], each[1]), weights);
    const __m256i second = _mm256_madd_epi16(_mm256_packus_epi32(each[2], each[3]), weights);
    const __m256i words = _mm256_packus_epi32(first, second);
    const __m256i bytes = _mm256_packus_epi16(words, words);
    const __m128i all =
        _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), all);
  }
  static constexpr int64_t kAtOnce = 4;  // of a StoreCodes
};

#elif defined(AWQD_NEON_BODY)

// Floats of one register, and what becomes of them.
struct Kv4Lanes {
  static constexpr int64_t kCount = 4;
  float32x4_t v;

  static Kv4Lanes Set(float value) { return {vdupq_n_f32(value)}; }
  static Kv4Lanes Load(const void* x, Element type, int64_t index) {
    return {Load4(x, type, index)};
  }
  // As kv4::Smaller and kv4::Larger, which NEON's own are not for signalling NaNs.
  static Kv4Lanes Smaller(Kv4Lanes a, Kv4Lanes b) {
    return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)};
  }
  static Kv4Lanes Larger(Kv4Lanes a, Kv4Lanes b) {
    return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)};
  }
  // Over all lanes, none of which is a NaN.
  float Least() const { return vminvq_f32(v); }
  float Greatest() const { return vmaxvq_f32(v); }

  static uint16x8_t Codes(float32x4_t x, Kv4Lanes inverse, Kv4Lanes zero) {
    const float32x4_t real = vaddq_f32(vmulq_f32(x, inverse.v), zero.v);
    const float32x4_t above = Larger({real}, Set(0)).v;
    return vreinterpretq_u16_u32(vcvtnq_u32_f32(vminq_f32(above, vdupq_n_f32(15))));
  }
  // Codes of 16 elements, as kv4::CodeOf makes them, in 8 bytes.
  static void StoreCodes(const Kv4Lanes (&x)[4], Kv4Lanes inverse, Kv4Lanes zero, uint8_t* codes) {
    uint16x8_t each[4];
    for (int i = 0; i < 4; ++i) each[i] = Codes(x[i].v, inverse, zero);
    const uint8x16_t bytes = vuzp1q_u8(vreinterpretq_u8_u16(vuzp1q_u16(each[0], each[1])),
                                       vreinterpretq_u8_u16(vuzp1q_u16(each[2], each[3])));
    // Neighbours a, b, which are a + 256 b, become a + 16 b.
    const uint16x8_t pairs = vreinterpretq_u16_u8(bytes);
    vst1_u8(codes, vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 4))));
  }
  static constexpr int64_t kAtOnce = 4;  // of a StoreCodes
};

#else

// One float: a machine without conversions spends its time on them.
struct Kv4Lanes {
  static constexpr int64_t kCount = 1;
  float v;

  static Kv4Lanes Set(float value) { return {value}; }
  static Kv4Lanes Load(const void* x, Element type, int64_t index) {
    return {Load1(x, type, index)};
  }
  static Kv4Lanes Smaller(Kv4Lanes a, Kv4Lanes b) { return {kv4::Smaller(a.v, b.v)}; }
  static Kv4Lanes Larger(Kv4Lanes a, Kv4Lanes b) { return {kv4::Larger(a.v, b.v)}; }
  float Least() const { return v; }
  float Greatest() const { return v; }
  static void StoreCodes(const Kv4Lanes (&x)[2], Kv4Lanes inverse, Kv4Lanes zero, uint8_t* codes) {
    *codes = static_cast<uint8_t>(kv4::CodeOf(x[0].v, inverse.v, zero.v) |
                                  kv4::CodeOf(x[1].v, inverse.v, zero.v) << 4);
  }
  static constexpr int64_t kAtOnce = 2;  // of a StoreCodes
};

#endif

// The range of a row of `cols` elements; infinities count.
template <Element kType>
inline void Kv4RangeOfRow(const void* x, int64_t cols, float* min, float* max) {
  Kv4Lanes low = Kv4Lanes::Set(kv4::kInfinity), high = Kv4Lanes::Set(-kv4::kInfinity);
  int64_t i = 0;
  for (; i + Kv4Lanes::kCount <= cols; i += Kv4Lanes::kCount) {
    const Kv4Lanes v = Kv4Lanes::Load(x, kType, i);
    low = Kv4Lanes::Smaller(v, low);
    high = Kv4Lanes::Larger(v, high);
  }
  *min = low.Least();
  *max = high.Greatest();
  for (; i < cols; ++i) {
    const float v = Load1(x, kType, i);
    *min = kv4::Smaller(v, *min);
    *max = kv4::Larger(v, *max);
  }
}

// The same without infinities.
inline void Kv4FiniteRangeOfRow(const void* x, Element type, int64_t cols, float* min, float* max) {
  *min = kv4::kInfinity;
  *max = -kv4::kInfinity;
  for (int64_t i = 0; i < cols; ++i) {
    const float v = Load1(x, type, i);
    if (!kv4::IsFinite(v)) continue;
    *min = kv4::Smaller(v, *min);
    *max = kv4::Larger(v, *max);
  }
}

template <Element kType>
void Kv4RangesOf(const Kv4Rows& rows, const void* x, float* min, float* max) {
  const char* row = static_cast<const char*>(x);
  for (int64_t r = 0; r < rows.rows; ++r, row += rows.cols * ElementBytes(kType)) {
    Kv4RangeOfRow<kType>(row, rows.cols, min + r, max + r);
    if (min[r] == -kv4::kInfinity || max[r] == kv4::kInfinity) {
      Kv4FiniteRangeOfRow(row, kType, rows.cols, min + r, max + r);
    }
  }
}

void Kv4Ranges(const Kv4Rows& rows, const void* x, float* min, float* max) {
  if (rows.type == Element::kFp16) return Kv4RangesOf<Element::kFp16>(rows, x, min, max);
  if (rows.type == Element::kBf16) return Kv4RangesOf<Element::kBf16>(rows, x, min, max);
  Kv4RangesOf<Element::kFp32>(rows, x, min, max);
}

template <Element kType>
inline void Kv4CodesOfRow(const void* x, int64_t cols, float inverse, float zero, uint8_t* codes) {
  constexpr int64_t kAtOnce = Kv4Lanes::kAtOnce, kStep = kAtOnce * Kv4Lanes::kCount;
  const Kv4Lanes by = Kv4Lanes::Set(inverse), plus = Kv4Lanes::Set(zero);
  int64_t i = 0;
  for (; i + kStep <= cols; i += kStep) {
    Kv4Lanes v[kAtOnce];
    for (int64_t j = 0; j < kAtOnce; ++j) v[j] = Kv4Lanes::Load(x, kType, i + j * Kv4Lanes::kCount);
    Kv4Lanes::StoreCodes(v, by, plus, codes + i / 2);
  }
  for (; i < cols; i += 2) {
    uint32_t pair = kv4::CodeOf(Load1(x, kType, i), inverse, zero);
    if (i + 1 < cols) pair |= kv4::CodeOf(Load1(x, kType, i + 1), inverse, zero) << 4;
    codes[i / 2] = static_cast<uint8_t>(pair);
  }
}

template <Element kType>
void Kv4CodesOf(const Kv4Rows& rows, const void* x, const float* inverse, const float* zero,
                uint8_t* codes) {
  const char* row = static_cast<const char*>(x);
  for (int64_t r = 0; r < rows.rows; ++r) {
    Kv4CodesOfRow<kType>(row, rows.cols, inverse[r], zero[r], codes);
    row += rows.cols * ElementBytes(kType);
    codes += (rows.cols + 1) / 2;
  }
}

void Kv4Codes(const Kv4Rows& rows, const void* x, const float* inverse, const float* zero,
              uint8_t* codes) {
  if (rows.type == Element::kFp16) {
    return Kv4CodesOf<Element::kFp16>(rows, x, inverse, zero, codes);
  }
  if (rows.type == Element::kBf16) {
    return Kv4CodesOf<Element::kBf16>(rows, x, inverse, zero, codes);
  }
  Kv4CodesOf<Element::kFp32>(rows, x, inverse, zero, codes);
}

}  // namespace
}  // namespace awqd::cpu
