// Pairs: 16 lanes of 32 bits, each one integer or a pair of 16-bit integers, for one instruction
// set. Included by panel_product.h behind a Vec, whose 16 floats are what the lanes become;
// everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/bodies/bodies.h"

namespace awqd::cpu {
namespace {

#if defined(__AVX2__)
// Bytes 0 and 1, and 2 and 3, of four lanes, each before a byte of 0.
inline __m128i LowOf4() {
  return _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1);
}
inline __m128i HighOf4() {
  return _mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1);
}
#endif

#if defined(__AVX512BW__)
struct Pairs {
  // Vectors of columns and tokens whose sums fit into registers.
  static constexpr int kVectors = 2, kTokens = 6;
  using Sums = Pairs;  // of products
  __m512i v = _mm512_setzero_si512();

  static Pairs Load(const void* p) { return {_mm512_loadu_si512(p)}; }
  // As TransposeTile wrote it: a load of what two stores left waits for both.
  static Pairs LoadWritten(const void* p) {
    const auto* at = static_cast<const uint8_t*>(p);
    return {_mm512_inserti64x4(_mm512_castsi256_si512(Load32(at)), Load32(at + 32), 1)};
  }
  void Store(void* p) const { _mm512_storeu_si512(p, v); }
  static Pairs Set(uint32_t lane) { return {_mm512_set1_epi32(static_cast<int>(lane))}; }
  // 8 bytes and 8 more, each to 32 bits.
  static Pairs Bytes(const uint8_t* low, const uint8_t* high) {
    return {_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(Load8Bytes(low), Load8Bytes(high)))};
  }
  Pairs operator&(Pairs o) const { return {_mm512_and_si512(v, o.v)}; }
  Pairs operator|(Pairs o) const { return {_mm512_or_si512(v, o.v)}; }
  Pairs operator^(Pairs o) const { return {_mm512_xor_si512(v, o.v)}; }
  Pairs operator>>(int bits) const { return {_mm512_srli_epi32(v, bits)}; }
  Pairs operator<<(int bits) const { return {_mm512_slli_epi32(v, bits)}; }
  // The lower and the upper two bytes of each lane, each to 16 bits.
  Pairs LowBytes() const { return {_mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(LowOf4()))}; }
  Pairs HighBytes() const { return {_mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(HighOf4()))}; }
  // Of 16-bit integers, modulo 2^16.
  Pairs Minus(Pairs o) const { return {_mm512_sub_epi16(v, o.v)}; }
  Pairs Times(Pairs o) const { return {_mm512_mullo_epi16(v, o.v)}; }
  // Adds both products of each lane's pairs.
  void AddProducts(Pairs a, Pairs b) { v = AddMultiplied(v, a.v, b.v); }
  Vec::F ToFloat() const { return _mm512_cvtepi32_ps(v); }

  // Of one integer in each lane: rounded to the nearest, ties to even; of 16 signed bytes.
  static Pairs Rounded(Vec::F f) { return {_mm512_cvtps_epi32(f)}; }
  static Pairs Signed(const int8_t* p) { return {_mm512_cvtepi8_epi32(Load16(p))}; }
  Pairs Plus(Pairs o) const { return {_mm512_add_epi32(v, o.v)}; }
  int32_t SumOfAll() const { return _mm512_reduce_add_epi32(v); }
  // The lower 8 or 16 bits of each lane.
  void StoreBytes(void* p) const {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
  }
  void StoreHalves(void* p) const {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
  }
};
#elif defined(__AVX2__)
struct Pairs {
  static constexpr int kVectors = 1, kTokens = 4;
  using Sums = Pairs;
  __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();

  static Pairs Load(const void* p) {
    return {Load32(p), Load32(static_cast<const uint8_t*>(p) + 32)};
  }
  static Pairs LoadWritten(const void* p) { return Load(p); }
  void Store(void* p) const {
    _mm256_storeu_si256(static_cast<__m256i*>(p), low);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, high);
  }
  static Pairs Set(uint32_t lane) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(lane));
    return {all, all};
  }
  static Pairs Bytes(const uint8_t* low, const uint8_t* high) {
    return {_mm256_cvtepu8_epi32(Load8Bytes(low)), _mm256_cvtepu8_epi32(Load8Bytes(high))};
  }
  Pairs operator&(Pairs o) const {
    return {_mm256_and_si256(low, o.low), _mm256_and_si256(high, o.high)};
  }
  Pairs operator|(Pairs o) const {
    return {_mm256_or_si256(low, o.low), _mm256_or_si256(high, o.high)};
  }
  Pairs operator^(Pairs o) const {
    return {_mm256_xor_si256(low, o.low), _mm256_xor_si256(high, o.high)};
  }
  Pairs operator>>(int bits) const {
    return {_mm256_srli_epi32(low, bits), _mm256_srli_epi32(high, bits)};
  }
  Pairs operator<<(int bits) const {
    return {_mm256_slli_epi32(low, bits), _mm256_slli_epi32(high, bits)};
  }
  Pairs LowBytes() const { return Shuffled(LowOf4()); }
  Pairs HighBytes() const { return Shuffled(HighOf4()); }
  Pairs Minus(Pairs o) const {
    return {_mm256_sub_epi16(low, o.low), _mm256_sub_epi16(high, o.high)};
  }
  Pairs Times(Pairs o) const {
    return {_mm256_mullo_epi16(low, o.low), _mm256_mullo_epi16(high, o.high)};
  }
  void AddProducts(const Pairs& a, const Pairs& b) {
#if defined(__AVXVNNI__)
    low = _mm256_dpwssd_avx_epi32(low, a.low, b.low);
    high = _mm256_dpwssd_avx_epi32(high, a.high, b.high);
#else
    low = _mm256_add_epi32(low, _mm256_madd_epi16(a.low, b.low));
    high = _mm256_add_epi32(high, _mm256_madd_epi16(a.high, b.high));
#endif
  }
  Vec::F ToFloat() const { return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}; }

  static Pairs Rounded(const Vec::F& f) {
    return {_mm256_cvtps_epi32(f.low), _mm256_cvtps_epi32(f.high)};
  }
  static Pairs Signed(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(Load8Bytes(p)), _mm256_cvtepi8_epi32(Load8Bytes(p + 8))};
  }
  Pairs Plus(Pairs o) const {
    return {_mm256_add_epi32(low, o.low), _mm256_add_epi32(high, o.high)};
  }
  int32_t SumOfAll() const {
    const __m256i of_8 = _mm256_add_epi32(low, high);
    const __m128i of_4 =
        _mm_add_epi32(_mm256_castsi256_si128(of_8), _mm256_extracti128_si256(of_8, 1));
    const __m128i of_2 = _mm_add_epi32(of_4, _mm_unpackhi_epi64(of_4, of_4));
    return _mm_cvtsi128_si32(of_2) + _mm_extract_epi32(of_2, 1);
  }
  void StoreBytes(void* p) const {
    const __m256i words = (*this & Set(0xff)).Halves();
    _mm_storeu_si128(
        static_cast<__m128i*>(p),
        _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
  void StoreHalves(void* p) const {
    _mm256_storeu_si256(static_cast<__m256i*>(p), (*this & Set(0xffff)).Halves());
  }
  // Lanes below 2^16, as 16 bits.
  __m256i Halves() const { return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8); }

  Pairs Shuffled(__m128i of_4) const {
    const __m256i index = _mm256_broadcastsi128_si256(of_4);
    return {_mm256_shuffle_epi8(low, index), _mm256_shuffle_epi8(high, index)};
  }
};
#elif !defined(AWQD_NEON_BODY)
struct Pairs {
  static constexpr int kVectors = 1, kTokens = 2;
  using Sums = Pairs;
  uint32_t v[16] = {};

  static Pairs Load(const void* p) {
    Pairs out;
    std::memcpy(out.v, p, sizeof(out.v));
    return out;
  }
  static Pairs LoadWritten(const void* p) { return Load(p); }
  void Store(void* p) const { std::memcpy(p, v, sizeof(v)); }
  static Pairs Set(uint32_t lane) {
    return Each([lane](int) { return lane; });
  }
  static Pairs Bytes(const uint8_t* low, const uint8_t* high) {
    return Each([&](int i) { return static_cast<uint32_t>(i < 8 ? low[i] : high[i - 8]); });
  }
  Pairs operator&(const Pairs& o) const {
    return Each([&](int i) { return v[i] & o.v[i]; });
  }
  Pairs operator|(const Pairs& o) const {
    return Each([&](int i) { return v[i] | o.v[i]; });
  }
  Pairs operator^(const Pairs& o) const {
    return Each([&](int i) { return v[i] ^ o.v[i]; });
  }
  Pairs operator>>(int bits) const {
    return Each([&](int i) { return v[i] >> bits; });
  }
  Pairs operator<<(int bits) const {
    return Each([&](int i) { return v[i] << bits; });
  }
  Pairs LowBytes() const {
    return Each([&](int i) { return (v[i] & 0xffu) | (v[i] & 0xff00u) << 8; });
  }
  Pairs HighBytes() const {
    return Each([&](int i) { return (v[i] >> 16 & 0xffu) | (v[i] >> 24) << 16; });
  }
  Pairs Minus(const Pairs& o) const {
    return Each([&](int i) {
      return ((v[i] - o.v[i]) & 0xffffu) | ((v[i] & ~0xffffu) - (o.v[i] & ~0xffffu));
    });
  }
  Pairs Times(const Pairs& o) const {
    return Each(
        [&](int i) { return (v[i] * o.v[i] & 0xffffu) | ((v[i] >> 16) * (o.v[i] >> 16) << 16); });
  }
  void AddProducts(const Pairs& a, const Pairs& b) {
    for (int i = 0; i < 16; ++i) {
      v[i] += static_cast<uint32_t>(Low(a.v[i]) * Low(b.v[i]) + High(a.v[i]) * High(b.v[i]));
    }
  }
  Vec::F ToFloat() const {
    return Vec::Each([&](int i) { return static_cast<float>(static_cast<int32_t>(v[i])); });
  }

  static int32_t Low(uint32_t lane) { return static_cast<int16_t>(lane & 0xffffu); }
  static int32_t High(uint32_t lane) { return static_cast<int32_t>(lane) >> 16; }
  template <typename Of>
  static Pairs Each(Of of) {
    Pairs out;
    for (int i = 0; i < 16; ++i) out.v[i] = of(i);
    return out;
  }
};
#endif

}  // namespace
}  // namespace awqd::cpu

#if defined(AWQD_NEON_BODY)
#include "kernels/cpu/bodies/integers/pairs_neon.h"
#endif
