// KV4 by rows: elements of codes. Everything has internal linkage, or is inlined everywhere
// (kv4_math.h).
//
// A row has 16 different elements. They are made and rounded first, then looked up: by registers
// where the instruction set can.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/bodies/vec.h"
#include "kernels/kv4_math.h"

namespace awqd::cpu {
namespace {

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

#if defined(__AVX512BW__)

template <bool kStream>
inline void StoreLine(void* out, __m512i v) {
  if (kStream) {
    _mm512_stream_si512(static_cast<__m512i*>(out), v);
  } else {
    _mm512_storeu_si512(out, v);
  }
}

// Whole lines of a row; returns how many elements they are.
template <bool kStream>
inline int64_t LookUpLines(const uint8_t* codes, int64_t cols, const uint16_t* table,
                           uint16_t* out) {
  const __m512i values =
      _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table)));
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

template <bool kStream>
inline int64_t LookUpLines(const uint8_t* codes, int64_t cols, const float* table, float* out) {
  const __m512i values = _mm512_loadu_si512(table);
  const __m512i mask = _mm512_set1_epi32(15);
  int64_t i = 0;
  for (; i + 16 <= cols; i += 16) {
    const __m512i bytes = _mm512_cvtepu8_epi64(Load8Bytes(codes + i / 2));
    const __m512i index =
        _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28)), mask);
    StoreLine<kStream>(out + i, _mm512_permutexvar_epi32(index, values));
  }
  return i;
}

#elif defined(__AVX2__)

template <bool kStream>
inline void StoreHalfLine(void* out, __m256i v) {
  if (kStream) {
    _mm256_stream_si256(static_cast<__m256i*>(out), v);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(out), v);
  }
}

// Whole lines of a row; returns how many elements they are. Upper and lower bytes are looked up
// apart.
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
    StoreHalfLine<kStream>(out + i, _mm256_permute2x128_si256(first, second, 0x20));
    StoreHalfLine<kStream>(out + i + 16, _mm256_permute2x128_si256(first, second, 0x31));
  }
  return i;
}

template <bool kStream>
inline int64_t LookUpLines(const uint8_t* codes, int64_t cols, const float* table, float* out) {
  const __m256i mask = _mm256_set1_epi32(15);
  const __m256i below = Load32(table), above = Load32(table + 8);
  int64_t i = 0;
  for (; i + 8 <= cols; i += 8) {
    uint32_t four;
    std::memcpy(&four, codes + i / 2, sizeof(four));
    const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(static_cast<int>(four)));
    const __m256i index =
        _mm256_and_si256(_mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28)), mask);
    // The look-up takes three bits of an index; the fourth, as a sign, picks one of two.
    const __m256 picked =
        _mm256_blendv_ps(_mm256_castsi256_ps(_mm256_permutevar8x32_epi32(below, index)),
                         _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(above, index)),
                         _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
    StoreHalfLine<kStream>(out + i, _mm256_castps_si256(picked));
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
    vst2q_u8(reinterpret_cast<uint8_t*>(out + i),
             {{vqtbl1q_u8(low, index), vqtbl1q_u8(high, index)}});
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
    vst4q_u8(reinterpret_cast<uint8_t*>(out + i),
             {{vqtbl1q_u8(bytes[0], index), vqtbl1q_u8(bytes[1], index),
               vqtbl1q_u8(bytes[2], index), vqtbl1q_u8(bytes[3], index)}});
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
