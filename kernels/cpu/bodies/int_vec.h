// IntVec: 16 lanes of 32 bits, each an integer or two 16-bit ones, and FloatVec: 16 floats. What
// all instruction sets have is written once over the compiler's vectors; the rest is below, for one
// set each. Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/lanes.h"

namespace awqd::cpu {
namespace {

struct FloatVec {
  Floats r[kRegisters];
};

struct IntVec {
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
  void Store(void* p) const {
    Times<kRegisters>([&](auto i) { StoreAs(static_cast<Lanes32*>(p) + i, r[i]); });
  }
  // As TransposeTile wrote it: a load of what two stores left waits for both.
  static IntVec LoadTransposed(const void* p) {
#if defined(__AVX512BW__)
    const auto* const at = static_cast<const uint8_t*>(p);
    return {(Lanes32)_mm512_inserti64x4(_mm512_castsi256_si512(Load32(at)), Load32(at + 32), 1)};
#else
    return Load(p);
#endif
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
    return Each([&](int i) AWQD_ALWAYS_INLINE { return ShiftRight(r[i], bits); });
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

  // To the nearest integers, ties to even, and back.
  static IntVec Round(const FloatVec& v) {
    return Each([&](int i) { return RoundToInts(v.r[i]); });
  }
  FloatVec ToFloat() const {
    FloatVec out;
    Times<kRegisters>(
        [&](auto i) AWQD_ALWAYS_INLINE { out.r[i] = __builtin_convertvector((Ints)r[i], Floats); });
    return out;
  }
  // The same bits.
  FloatVec AsFloats() const {
    FloatVec out;
    Times<kRegisters>([&](auto i) AWQD_ALWAYS_INLINE { out.r[i] = (Floats)r[i]; });
    return out;
  }
  int32_t SumOfAll() const {
    const auto add = [](Lanes32 a, Lanes32 b) { return a + b; };
    return static_cast<int32_t>(FoldLanes(FoldRegisters(r, add), add));
  }
  // 16 halves, each to 32 bits, and the lower 16 bits of each lane.
  static IntVec LoadHalves(const void* p) {
    return Each(
        [&](int i) { return WidenHalves(LoadAs<Halves>(static_cast<const Halves*>(p) + i)); });
  }
  void StoreHalves(void* p) const {
#if defined(__AVX2__) && !defined(__AVX512BW__)
    StoreAs(p, ToHalves(*this & Set(0xffff)));
#else
    Times<kRegisters>([&](auto i) { StoreAs(static_cast<Halves*>(p) + i, NarrowWords(r[i])); });
#endif
  }

  // 8 bytes and 8 more, each to 32 bits.
  static IntVec WidenBytes(const uint8_t* low, const uint8_t* high);
  // 16 signed bytes, each to 32 bits.
  static IntVec WidenSigned(const void* p);
  // The lower 8 bits of each lane.
  void StoreBytes(void* p) const;
  // The lower and the upper two bytes of each lane, each to 16 bits.
  IntVec LowBytes() const;
  IntVec HighBytes() const;
#if defined(__AVX2__) && !defined(__AVX512BW__)
  // Lanes below 2^16, as 16 bits.
  static __m256i ToHalves(const IntVec& v) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v.r[0], (__m256i)v.r[1]), 0xd8);
  }
#endif
#if !defined(AWQD_NEON_BODY)
  // Adds both products of each lane's 16-bit integers.
  AWQD_ALWAYS_INLINE void AddProducts(const IntVec& a, const IntVec& b) {
    *this = Each([&](int i) { return AddPairs(r[i], (Lanes16)a.r[i], (Lanes16)b.r[i]); });
  }
#endif
};

#if defined(__AVX2__)

inline IntVec IntVec::LowBytes() const {
  return Each([&](int i) {
    return ShuffleBytes(r[i],
                        _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
  });
}
inline IntVec IntVec::HighBytes() const {
  return Each([&](int i) {
    return ShuffleBytes(r[i],
                        _mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1));
  });
}
#if defined(__AVX512BW__)
inline IntVec IntVec::WidenBytes(const uint8_t* low, const uint8_t* high) {
  return {(Lanes32)_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(Load8Bytes(low), Load8Bytes(high)))};
}
inline IntVec IntVec::WidenSigned(const void* p) {
  return {(Lanes32)_mm512_cvtepi8_epi32(Load16(p))};
}
inline void IntVec::StoreBytes(void* p) const {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)r[0]));
}
#else
inline IntVec IntVec::WidenBytes(const uint8_t* low, const uint8_t* high) {
  return {(Lanes32)_mm256_cvtepu8_epi32(Load8Bytes(low)),
          (Lanes32)_mm256_cvtepu8_epi32(Load8Bytes(high))};
}
inline IntVec IntVec::WidenSigned(const void* p) {
  const __m128i all = Load16(p);
  return {(Lanes32)_mm256_cvtepi8_epi32(all),
          (Lanes32)_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))};
}
inline void IntVec::StoreBytes(void* p) const {
  const __m256i halves = ToHalves(*this & Set(0xff));
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm_packus_epi16(_mm256_castsi256_si128(halves),
                                                              _mm256_extracti128_si256(halves, 1)));
}
#endif

#else

inline IntVec IntVec::LowBytes() const {
  return (*this & Set(0xff)) | ((*this << 8) & Set(0xff0000));
}
inline IntVec IntVec::HighBytes() const { return (*this >> 16).LowBytes(); }

#if defined(AWQD_NEON_BODY)
// Sums of products of the 16-bit integers of lanes. NEON adds each product to a lane of its own, so
// there are two to the end.
struct NeonIntSums {
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
  FloatVec ToFloat() const { return Fold().ToFloat(); }
  void Store(void* p) const { Fold().Store(p); }
};

inline IntVec SignExtend(int16x8_t low, int16x8_t high) {
  return {(Lanes32)vmovl_s16(vget_low_s16(low)), (Lanes32)vmovl_high_s16(low),
          (Lanes32)vmovl_s16(vget_low_s16(high)), (Lanes32)vmovl_high_s16(high)};
}
inline IntVec IntVec::WidenBytes(const uint8_t* low, const uint8_t* high) {
  return SignExtend((int16x8_t)vmovl_u8(vld1_u8(low)), (int16x8_t)vmovl_u8(vld1_u8(high)));
}
inline IntVec IntVec::WidenSigned(const void* p) {
  const int8x16_t all = vld1q_s8(static_cast<const int8_t*>(p));
  return SignExtend(vmovl_s8(vget_low_s8(all)), vmovl_high_s8(all));
}
inline void IntVec::StoreBytes(void* p) const {
  const auto narrow = [&](int i) {
    return vmovn_u16(
        vcombine_u16((uint16x4_t)NarrowWords(r[i]), (uint16x4_t)NarrowWords(r[i + 1])));
  };
  vst1q_u8(static_cast<uint8_t*>(p), vcombine_u8(narrow(0), narrow(2)));
}
#else
inline IntVec IntVec::WidenBytes(const uint8_t* low, const uint8_t* high) {
  uint32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = i < 8 ? low[i] : high[i - 8];
  return Load(lanes);
}
inline IntVec IntVec::WidenSigned(const void* p) {
  int32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<const int8_t*>(p)[i];
  return Load(lanes);
}
inline void IntVec::StoreBytes(void* p) const {
  uint32_t lanes[16];
  Store(lanes);
  for (int i = 0; i < 16; ++i) static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(lanes[i]);
}
#endif
#endif

#if defined(AWQD_NEON_BODY)
using IntSums = NeonIntSums;
#else
using IntSums = IntVec;
#endif

}  // namespace
}  // namespace awqd::cpu
