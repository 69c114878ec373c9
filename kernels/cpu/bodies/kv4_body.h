// KV4 by rows: ranges and codes of elements, and elements of codes. Everything has internal
// linkage, or is inlined everywhere (kv4_math.h).
//
// Codes are made over a register of floats: where the compiler is left to vectorise CodeOf, it
// takes three times as long (GCC 12). A row has 16 different elements, which are made and rounded
// first, then looked up: by registers where the instruction set can.
#pragma once

#include "kernels/cpu/bodies/vec.h"
#include "kernels/kv4_math.h"

namespace awqd::cpu {
namespace {

// --- Ranges ---

// The range of a row of `cols` elements; infinities count.
template <Element kType>
inline void Kv4RangeOfRow(const void* x, int64_t cols, float* min, float* max) {
  // As kv4::Smaller and kv4::Larger, which drop a NaN.
  Vec::F low = Vec::Set(kv4::kInfinity), high = Vec::Set(-kv4::kInfinity);
  int64_t i = 0;
  for (; i + 16 <= cols; i += 16) {
    const Vec::F v = Vec::Load16Of(x, kType, i);
    low = Vec::Min(v, low);
    high = Vec::Max(v, high);
  }
  *min = Vec::MinOfAll(low);
  *max = Vec::MaxOfAll(high);
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

// --- Codes ---

// Vectors of codes that are stored together.
#if defined(__AVX2__) && !defined(__AVX512BW__)
constexpr int kCodeVectors = 2;
#else
constexpr int kCodeVectors = 1;
#endif

// Codes 2 i and 2 i + 1 in byte i.
inline void StoreCodes(const IntVec (&codes)[kCodeVectors], uint8_t* out) {
#if defined(__AVX512BW__)
  const auto all = (__m512i)codes[0].r[0];
  const __m512i pairs = _mm512_or_si512(all, _mm512_srli_epi64(all, 28));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_cvtepi64_epi8(pairs));
#elif defined(__AVX2__)
  // Neighbours a, b become a + 16 b. Packing works on halves of registers: elements 0 to 3 of all
  // four stay in the lower half, elements 4 to 7 in the upper.
  const __m256i weights = _mm256_set1_epi32(16 << 16 | 1);
  const auto pack = [&](const IntVec& v) {
    return _mm256_madd_epi16(_mm256_packus_epi32((__m256i)v.r[0], (__m256i)v.r[1]), weights);
  };
  const __m256i words = _mm256_packus_epi32(pack(codes[0]), pack(codes[1]));
  const __m256i bytes = _mm256_packus_epi16(words, words);
  const __m128i all =
      _mm_unpacklo_epi16(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), all);
#elif defined(AWQD_NEON_BODY)
  const auto pack = [&](int i) {
    return (uint8x16_t)vuzp1q_u16((uint16x8_t)codes[0].r[i], (uint16x8_t)codes[0].r[i + 1]);
  };
  // Neighbours a, b, which are a + 256 b, become a + 16 b.
  const auto pairs = (uint16x8_t)vuzp1q_u8(pack(0), pack(2));
  vst1_u8(out, vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 4))));
#else
  uint32_t lanes[16];
  codes[0].Store(lanes);
  for (int i = 0; i < 8; ++i) {
    out[i] = static_cast<uint8_t>(lanes[2 * i] | lanes[2 * i + 1] << 4);
  }
#endif
}

template <Element kType>
inline void Kv4CodesOfRow(const void* x, int64_t cols, float inverse, float zero, uint8_t* codes) {
  constexpr int64_t kStep = 16 * kCodeVectors;
  int64_t i = 0;
  for (; i + kStep <= cols; i += kStep) {
    IntVec each[kCodeVectors];
    for (int j = 0; j < kCodeVectors; ++j) {
      // As kv4::CodeOf.
      const Vec::F real = Vec::Add(Vec::Mul(Vec::Load16Of(x, kType, i + 16 * j), Vec::Set(inverse)),
                                   Vec::Set(zero));
      each[j] = IntVec::Round(Vec::Min(Vec::Max(real, Vec::Zero()), Vec::Set(15)));
    }
    StoreCodes(each, codes + i / 2);
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

// --- Elements of codes ---

// The value of each code, before the rounding to the output type.
inline void Kv4Table(float scale, float zero, bool fused, float* table) {
  const float u[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  if (fused) {
    for (int i = 0; i < 16; ++i) table[i] = kv4::FusedToOdd(u[i], scale, zero);
  } else {
    for (int i = 0; i < 16; ++i) table[i] = kv4::Exact(u[i], scale, zero);
  }
}

// Elements from `begin` of a row on, one by one.
template <typename T>
inline void LookUp(const uint8_t* codes, int64_t begin, int64_t end, const T* table, T* out) {
  for (int64_t i = begin; i < end; ++i) out[i] = table[codes[i / 2] >> (i % 2 * 4) & 15];
}

template <bool kStream, typename V>
inline void StoreLine(void* out, V v) {
  if (kStream) {
    StreamVector(out, v);
  } else {
    StoreAs(out, v);
  }
}

#if defined(__AVX2__)

#if defined(__AVX512BW__)
// Code i of 8 or 4 bytes in lane i, below other bits.
inline Lanes32 SpreadCodes(const uint8_t* codes) {
  const __m512i bytes = _mm512_cvtepu8_epi64(Load8Bytes(codes));
  return (Lanes32)_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
}

// Whole lines of a row; returns how many elements they are.
template <bool kStream>
inline int64_t LookUpLines(const uint8_t* codes, int64_t cols, const uint16_t* table,
                           uint16_t* out) {
  const __m512i values = _mm512_castsi256_si512(Load32(table));
  const __m512i mask = _mm512_set1_epi32(0x000f000f);
  int64_t i = 0;
  for (; i + 32 <= cols; i += 32) {
    const __m512i bytes = _mm512_cvtepu8_epi32(Load16(codes + i / 2));
    const __m512i index =
        _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), mask);
    StoreLine<kStream>(out + i, _mm512_permutexvar_epi16(index, values));
  }
  return i;
}
#else
inline Lanes32 SpreadCodes(const uint8_t* codes) {
  uint32_t four;
  std::memcpy(&four, codes, sizeof(four));
  const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(static_cast<int>(four)));
  return (Lanes32)_mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28));
}

// Upper and lower bytes are looked up apart.
template <bool kStream>
inline int64_t LookUpLines(const uint8_t* codes, int64_t cols, const uint16_t* table,
                           uint16_t* out) {
  alignas(16) uint8_t low[16], high[16];
  for (int u = 0; u < 16; ++u) {
    low[u] = static_cast<uint8_t>(table[u]);
    high[u] = static_cast<uint8_t>(table[u] >> 8);
  }
  const __m256i lows = _mm256_broadcastsi128_si256(Load16(low));
  const __m256i highs = _mm256_broadcastsi128_si256(Load16(high));
  const __m128i mask = _mm_set1_epi8(15);
  int64_t i = 0;
  for (; i + 32 <= cols; i += 32) {
    const __m128i bytes = Load16(codes + i / 2);
    const __m128i even = _mm_and_si128(bytes, mask);
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    const __m256i index =
        _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
    const __m256i a = _mm256_shuffle_epi8(lows, index), b = _mm256_shuffle_epi8(highs, index);
    const __m256i first = _mm256_unpacklo_epi8(a, b), second = _mm256_unpackhi_epi8(a, b);
    StoreLine<kStream>(out + i, _mm256_permute2x128_si256(first, second, 0x20));
    StoreLine<kStream>(out + i + 16, _mm256_permute2x128_si256(first, second, 0x31));
  }
  return i;
}
#endif

template <bool kStream>
inline int64_t LookUpLines(const uint8_t* codes, int64_t cols, const float* table, float* out) {
  const Vec::F values = Vec::Load(table);
  int64_t i = 0;
  for (; i + kLanes <= cols; i += kLanes) {
    const Floats picked = Vec::LookupLanes(values, SpreadCodes(codes + i / 2), 0);
    StoreLine<kStream>(out + i, (Vec::StreamedFloats)picked);
  }
  return i;
}

#elif defined(AWQD_NEON_BODY)

// 16 codes of 8 bytes, in order.
inline uint8x16_t CodesOf16(const uint8_t* codes) {
  const uint8x8_t bytes = vld1_u8(codes);
  const uint8x8_t even = vand_u8(bytes, vdup_n_u8(15)), odd = vshr_n_u8(bytes, 4);
  return vcombine_u8(vzip1_u8(even, odd), vzip2_u8(even, odd));
}

// Byte `b` of each of 16 values.
template <typename T>
inline uint8x16_t BytesOfValues(const T* table, size_t b) {
  uint8_t bytes[16];
  for (int u = 0; u < 16; ++u) {
    std::memcpy(bytes + u, reinterpret_cast<const uint8_t*>(table + u) + b, 1);
  }
  return vld1q_u8(bytes);
}

// Whole runs of 16 elements of a row; returns how many elements they are. Each byte of the values
// is looked up apart, and stores interleave them.
template <bool kStream>
inline int64_t LookUpLines(const uint8_t* codes, int64_t cols, const uint16_t* table,
                           uint16_t* out) {
  const uint8x16_t low = BytesOfValues(table, 0), high = BytesOfValues(table, 1);
  int64_t i = 0;
  for (; i + 16 <= cols; i += 16) {
    const uint8x16_t index = CodesOf16(codes + i / 2);
    const uint8x16x2_t picked = {{vqtbl1q_u8(low, index), vqtbl1q_u8(high, index)}};
    vst2q_u8(reinterpret_cast<uint8_t*>(out + i), picked);
  }
  return i;
}

template <bool kStream>
inline int64_t LookUpLines(const uint8_t* codes, int64_t cols, const float* table, float* out) {
  const uint8x16_t bytes[4] = {BytesOfValues(table, 0), BytesOfValues(table, 1),
                               BytesOfValues(table, 2), BytesOfValues(table, 3)};
  int64_t i = 0;
  for (; i + 16 <= cols; i += 16) {
    const uint8x16_t index = CodesOf16(codes + i / 2);
    const uint8x16x4_t picked = {{vqtbl1q_u8(bytes[0], index), vqtbl1q_u8(bytes[1], index),
                                  vqtbl1q_u8(bytes[2], index), vqtbl1q_u8(bytes[3], index)}};
    vst4q_u8(reinterpret_cast<uint8_t*>(out + i), picked);
  }
  return i;
}

#else

// A byte's two elements at a time.
template <bool kStream, typename T>
inline int64_t LookUpLines(const uint8_t* codes, int64_t cols, const T* table, T* out) {
  for (int64_t i = 0; i < cols / 2; ++i) {
    const T two[2] = {table[codes[i] & 15], table[codes[i] >> 4]};
    std::memcpy(out + 2 * i, two, sizeof(two));
  }
  return cols / 2 * 2;
}

#endif

// The table as elements of the result.
inline const float* Rounded(const float* table, Element, float*) { return table; }
inline const uint16_t* Rounded(const float* table, Element type, uint16_t* rounded) {
  // The compiler is shown that elements here have two bytes.
  const Element narrow = type == Element::kFp16 ? Element::kFp16 : Element::kBf16;
  for (int64_t u = 0; u < 16; u += 8) Store8Plus(rounded, narrow, u, table + u, nullptr);
  return rounded;
}

template <bool kStream, typename T>
void Kv4ElementsAs(const Kv4Rows& rows, const uint8_t* codes, const Kv4Decoding& load, T* out) {
  float table[16];
  T spare[16];
  for (int64_t r = 0; r < rows.rows; ++r) {
    Kv4Table(load.scale[r], load.zero[r], load.fused, table);
    const T* const values = Rounded(table, rows.type, spare);
    const int64_t done = LookUpLines<kStream>(codes, rows.cols, values, out);
    LookUp(codes, done, rows.cols, values, out);
    codes += (rows.cols + 1) / 2;
    out += rows.cols;
  }
}

template <typename T>
void Kv4ElementsOf(const Kv4Rows& rows, const uint8_t* codes, const Kv4Decoding& load, T* out) {
  const auto place =
      reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(rows.cols) * sizeof(T);
  if (!load.stream || place % 64 != 0) return Kv4ElementsAs<false>(rows, codes, load, out);
  Kv4ElementsAs<true>(rows, codes, load, out);
  StreamFence();
}

void Kv4Elements(const Kv4Rows& rows, const uint8_t* codes, const Kv4Decoding& load, void* out) {
  if (rows.type == Element::kFp32) {
    Kv4ElementsOf(rows, codes, load, static_cast<float*>(out));
  } else {
    Kv4ElementsOf(rows, codes, load, static_cast<uint16_t*>(out));
  }
}

}  // namespace
}  // namespace awqd::cpu
