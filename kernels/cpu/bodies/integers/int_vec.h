// IntVec: 16 lanes of 32 bits, each an integer or two 16-bit ones. What all instruction sets have
// is written once over the compiler's vectors; the rest is below, for one set each. Everything has
// internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/bodies/unroll.h"
#include "kernels/cpu/bodies/vec.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace awqd::cpu {
namespace {

// The vector registers of the instruction set.
#if defined(__AVX512BW__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef uint32_t Lanes32 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Lanes16 __attribute__((vector_size(kVectorBytes)));
typedef uint8_t Lanes8 __attribute__((vector_size(kVectorBytes)));

AWQD_ALWAYS_INLINE inline Lanes32 LoadVector(const void* p) {
  Lanes32 out;
  std::memcpy(&out, p, sizeof(out));
  return out;
}

struct IntVec {
  static constexpr int kRegisters = 64 / kVectorBytes;
  // How many of them, side by side, and for how many tokens, a product from panels sums at a time.
#if defined(__AVX512BW__)
  static constexpr int kVectors = 2, kTokens = 6;
#elif defined(__AVX2__)
  static constexpr int kVectors = 1, kTokens = 4;
#elif defined(AWQD_NEON_BODY)
  // Three tokens' sums take 24 registers of 32.
  static constexpr int kVectors = 1, kTokens = 3;
#else
  static constexpr int kVectors = 1, kTokens = 2;
#endif

  Lanes32 r[kRegisters] = {};

  template <typename Of>
  AWQD_ALWAYS_INLINE static IntVec Each(Of of) {
    IntVec out;
    Times<kRegisters>([&](auto i) AWQD_ALWAYS_INLINE { out.r[i] = of(i); });
    return out;
  }
  static IntVec Set(uint32_t lane) {
    return Each([lane](int) { return Lanes32{} + lane; });
  }
  static IntVec Load(const void* p) {
    return Each([p](int i) { return LoadVector(static_cast<const Lanes32*>(p) + i); });
  }
  // As TransposeTile wrote it: a load of what two stores left waits for both.
  static IntVec LoadTransposed(const void* p);
  void Store(void* p) const {
    Times<kRegisters>(
        [&](auto i) { std::memcpy(static_cast<Lanes32*>(p) + i, &r[i], sizeof(Lanes32)); });
  }
  IntVec operator&(const IntVec& o) const {
    return Each([&](int i) { return r[i] & o.r[i]; });
  }
  IntVec operator|(const IntVec& o) const {
    return Each([&](int i) { return r[i] | o.r[i]; });
  }
  IntVec operator^(const IntVec& o) const {
    return Each([&](int i) { return r[i] ^ o.r[i]; });
  }
  IntVec operator>>(int bits) const {
    return Each([&](int i) { return r[i] >> bits; });
  }
  IntVec operator<<(int bits) const {
    return Each([&](int i) { return r[i] << bits; });
  }
  // 32-bit integers.
  IntVec operator+(const IntVec& o) const {
    return Each([&](int i) { return r[i] + o.r[i]; });
  }
  // 16-bit integers, modulo 2^16.
  IntVec Subtract16(const IntVec& o) const {
    return Each([&](int i) { return (Lanes32)((Lanes16)r[i] - (Lanes16)o.r[i]); });
  }
  IntVec Multiply16(const IntVec& o) const {
    return Each([&](int i) { return (Lanes32)((Lanes16)r[i] * (Lanes16)o.r[i]); });
  }

  // 8 bytes and 8 more, each to 32 bits.
  static IntVec WidenBytes(const uint8_t* low, const uint8_t* high);
  // 16 signed bytes, each to 32 bits.
  static IntVec WidenSigned(const int8_t* p);
  // The lower and the upper two bytes of each lane, each to 16 bits.
  IntVec LowBytes() const;
  IntVec HighBytes() const;
  // To the nearest integers, ties to even, and back.
  static IntVec Round(const Vec::F& f);
  Vec::F ToFloat() const;
  int32_t SumOfAll() const;
  // The lower 8 or 16 bits of each lane.
  void StoreBytes(void* p) const;
  void StoreHalves(void* p) const;

#if !defined(AWQD_NEON_BODY)
  // Adds both products of each lane's 16-bit integers.
  void AddProducts(const IntVec& a, const IntVec& b);
#endif
};

#if defined(__AVX2__)
// Indices of a shuffle within 16 bytes: bytes 0 and 1, or 2 and 3, of four lanes, each before a
// byte of 0.
inline __m128i LowBytesOf4() {
  return _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1);
}
inline __m128i HighBytesOf4() {
  return _mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1);
}
#endif

#if defined(__AVX512BW__)
using IntSums = IntVec;

inline IntVec IntVec::LoadTransposed(const void* p) {
  const auto* at = static_cast<const uint8_t*>(p);
  return {(Lanes32)_mm512_inserti64x4(_mm512_castsi256_si512(Load32(at)), Load32(at + 32), 1)};
}
inline IntVec IntVec::WidenBytes(const uint8_t* low, const uint8_t* high) {
  return {(Lanes32)_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(Load8Bytes(low), Load8Bytes(high)))};
}
inline IntVec IntVec::WidenSigned(const int8_t* p) {
  return {(Lanes32)_mm512_cvtepi8_epi32(Load16(p))};
}
inline IntVec IntVec::LowBytes() const {
  return {(Lanes32)_mm512_shuffle_epi8((__m512i)r[0], _mm512_broadcast_i32x4(LowBytesOf4()))};
}
inline IntVec IntVec::HighBytes() const {
  return {(Lanes32)_mm512_shuffle_epi8((__m512i)r[0], _mm512_broadcast_i32x4(HighBytesOf4()))};
}
inline void IntVec::AddProducts(const IntVec& a, const IntVec& b) {
  r[0] = (Lanes32)AddMultiplied((__m512i)r[0], (__m512i)a.r[0], (__m512i)b.r[0]);
}
inline IntVec IntVec::Round(const Vec::F& f) { return {(Lanes32)_mm512_cvtps_epi32(f)}; }
inline Vec::F IntVec::ToFloat() const { return _mm512_cvtepi32_ps((__m512i)r[0]); }
inline int32_t IntVec::SumOfAll() const { return _mm512_reduce_add_epi32((__m512i)r[0]); }
inline void IntVec::StoreBytes(void* p) const {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)r[0]));
}
inline void IntVec::StoreHalves(void* p) const {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)r[0]));
}

#elif defined(__AVX2__)
using IntSums = IntVec;

inline IntVec IntVec::LoadTransposed(const void* p) { return Load(p); }
inline IntVec IntVec::WidenBytes(const uint8_t* low, const uint8_t* high) {
  return {(Lanes32)_mm256_cvtepu8_epi32(Load8Bytes(low)),
          (Lanes32)_mm256_cvtepu8_epi32(Load8Bytes(high))};
}
inline IntVec IntVec::WidenSigned(const int8_t* p) {
  return {(Lanes32)_mm256_cvtepi8_epi32(Load8Bytes(p)),
          (Lanes32)_mm256_cvtepi8_epi32(Load8Bytes(p + 8))};
}
inline IntVec ShuffleBytes(const IntVec& v, __m128i indices) {
  const __m256i both = _mm256_broadcastsi128_si256(indices);
  return IntVec::Each([&](int i) { return (Lanes32)_mm256_shuffle_epi8((__m256i)v.r[i], both); });
}
inline IntVec IntVec::LowBytes() const { return ShuffleBytes(*this, LowBytesOf4()); }
inline IntVec IntVec::HighBytes() const { return ShuffleBytes(*this, HighBytesOf4()); }
inline void IntVec::AddProducts(const IntVec& a, const IntVec& b) {
  *this = Each([&](int i) {
#if defined(__AVXVNNI__)
    return (Lanes32)_mm256_dpwssd_avx_epi32((__m256i)r[i], (__m256i)a.r[i], (__m256i)b.r[i]);
#else
    return r[i] + (Lanes32)_mm256_madd_epi16((__m256i)a.r[i], (__m256i)b.r[i]);
#endif
  });
}
inline IntVec IntVec::Round(const Vec::F& f) {
  return {(Lanes32)_mm256_cvtps_epi32(f.low), (Lanes32)_mm256_cvtps_epi32(f.high)};
}
inline Vec::F IntVec::ToFloat() const {
  return {_mm256_cvtepi32_ps((__m256i)r[0]), _mm256_cvtepi32_ps((__m256i)r[1])};
}
inline int32_t IntVec::SumOfAll() const {
  const auto of_8 = (__m256i)(r[0] + r[1]);
  const __m128i of_4 =
      _mm_add_epi32(_mm256_castsi256_si128(of_8), _mm256_extracti128_si256(of_8, 1));
  const __m128i of_2 = _mm_add_epi32(of_4, _mm_unpackhi_epi64(of_4, of_4));
  return _mm_cvtsi128_si32(of_2) + _mm_extract_epi32(of_2, 1);
}
// Lanes below 2^16, as 16 bits.
inline __m256i ToHalves(const IntVec& v) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v.r[0], (__m256i)v.r[1]), 0xd8);
}
inline void IntVec::StoreBytes(void* p) const {
  const __m256i halves = ToHalves(*this & Set(0xff));
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm_packus_epi16(_mm256_castsi256_si128(halves),
                                                              _mm256_extracti128_si256(halves, 1)));
}
inline void IntVec::StoreHalves(void* p) const {
  _mm256_storeu_si256(static_cast<__m256i*>(p), ToHalves(*this & Set(0xffff)));
}

#else
inline IntVec IntVec::LoadTransposed(const void* p) { return Load(p); }
inline IntVec IntVec::LowBytes() const {
  return (*this & Set(0xff)) | ((*this << 8) & Set(0xff0000));
}
inline IntVec IntVec::HighBytes() const { return (*this >> 16).LowBytes(); }

#if defined(AWQD_NEON_BODY)
// Sums of products of the 16-bit integers of lanes. NEON adds each product to a lane of its own, so
// there are two to the end.
struct IntSums {
  int32x4_t v[8] = {};

  AWQD_ALWAYS_INLINE void AddProducts(const IntVec& a, const IntVec& b) {
    Times<4>([&](auto i) AWQD_ALWAYS_INLINE {
      const auto x = (int16x8_t)a.r[i], w = (int16x8_t)b.r[i];
      v[2 * i] = vmlal_s16(v[2 * i], vget_low_s16(x), vget_low_s16(w));
      v[2 * i + 1] = vmlal_high_s16(v[2 * i + 1], x, w);
    });
  }
  IntVec Fold() const {
    return IntVec::Each([this](int i) { return (Lanes32)vpaddq_s32(v[2 * i], v[2 * i + 1]); });
  }
  Vec::F ToFloat() const { return Fold().ToFloat(); }
  void Store(void* p) const { Fold().Store(p); }
};

inline IntVec WidenHalves(int16x8_t low, int16x8_t high) {
  return {(Lanes32)vmovl_s16(vget_low_s16(low)), (Lanes32)vmovl_high_s16(low),
          (Lanes32)vmovl_s16(vget_low_s16(high)), (Lanes32)vmovl_high_s16(high)};
}
inline IntVec IntVec::WidenBytes(const uint8_t* low, const uint8_t* high) {
  return WidenHalves((int16x8_t)vmovl_u8(vld1_u8(low)), (int16x8_t)vmovl_u8(vld1_u8(high)));
}
inline IntVec IntVec::WidenSigned(const int8_t* p) {
  const int8x16_t all = vld1q_s8(p);
  return WidenHalves(vmovl_s8(vget_low_s8(all)), vmovl_high_s8(all));
}
inline IntVec IntVec::Round(const Vec::F& f) {
  return Each([&](int i) { return (Lanes32)vcvtnq_s32_f32(f.q[i]); });
}
inline Vec::F IntVec::ToFloat() const {
  return Vec::Each([this](int i) { return vcvtq_f32_s32((int32x4_t)r[i]); });
}
inline int32_t IntVec::SumOfAll() const {
  return vaddvq_s32((int32x4_t)((r[0] + r[1]) + (r[2] + r[3])));
}
inline uint16x8_t ToHalves(Lanes32 a, Lanes32 b) {
  return vcombine_u16(vmovn_u32((uint32x4_t)a), vmovn_u32((uint32x4_t)b));
}
inline void IntVec::StoreBytes(void* p) const {
  vst1q_u8(static_cast<uint8_t*>(p),
           vcombine_u8(vmovn_u16(ToHalves(r[0], r[1])), vmovn_u16(ToHalves(r[2], r[3]))));
}
inline void IntVec::StoreHalves(void* p) const {
  vst1q_u16(static_cast<uint16_t*>(p), ToHalves(r[0], r[1]));
  vst1q_u16(static_cast<uint16_t*>(p) + 8, ToHalves(r[2], r[3]));
}
#else
using IntSums = IntVec;

inline IntVec IntVec::WidenBytes(const uint8_t* low, const uint8_t* high) {
  uint32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = i < 8 ? low[i] : high[i - 8];
  return Load(lanes);
}
inline void IntVec::AddProducts(const IntVec& a, const IntVec& b) {
#if defined(__SSE2__)
  // Every x86-64 machine has it.
  *this =
      Each([&](int i) { return r[i] + (Lanes32)_mm_madd_epi16((__m128i)a.r[i], (__m128i)b.r[i]); });
#else
  const auto low = [](uint32_t lane) { return static_cast<int16_t>(lane & 0xffffu); };
  const auto high = [](uint32_t lane) { return static_cast<int32_t>(lane) >> 16; };
  uint32_t sums[16], x[16], w[16];
  Store(sums);
  a.Store(x);
  b.Store(w);
  for (int i = 0; i < 16; ++i) {
    sums[i] += static_cast<uint32_t>(low(x[i]) * low(w[i]) + high(x[i]) * high(w[i]));
  }
  *this = Load(sums);
#endif
}
inline Vec::F IntVec::ToFloat() const {
  int32_t lanes[16];
  Store(lanes);
  return Vec::Each([&](int i) { return static_cast<float>(lanes[i]); });
}
#endif
#endif

}  // namespace
}  // namespace awqd::cpu
