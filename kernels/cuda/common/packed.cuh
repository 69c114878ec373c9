// Packed-register operations (lop3, prmt, two fp16 or bf16 lanes per word) with a portable host
// body that gives the same bits, so that everything built on them is tested without a GPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/base/half.h"

#ifdef __CUDACC__
#define AWQD_HD __host__ __device__ __forceinline__
#else
#define AWQD_HD inline
#endif

// Unrolls the next loop in device code.
#ifdef __CUDA_ARCH__
#define AWQD_UNROLL _Pragma("unroll")
#else
#define AWQD_UNROLL
#endif

namespace awqd::cuda {

namespace host {

// One ulp closer to zero with the last bit set: what round-to-odd makes of a value that lies just
// below `bits`.
inline double OddBelow(double v) {
  return std::bit_cast<double>((std::bit_cast<uint64_t>(v) - 1) | 1);
}

// a * b + c in double, rounded to odd, so that one further rounding to a narrower type is the only
// one that counts. The product must be exact in double: true for fp16 and bf16 factors.
inline double FmaToOdd(float a, float b, float c) {
  const double p = static_cast<double>(a) * b;
  const double s = p + c;
  if (!std::isfinite(s)) return s;
  const double from_c = s - p;
  const double error = (p - (s - from_c)) + (c - from_c);
  if (error == 0) return s;
  if ((error > 0) != (s > 0)) return OddBelow(s);
  return std::bit_cast<double>(std::bit_cast<uint64_t>(s) | 1);
}

inline float ToFloatOdd(double v) {
  const float f = static_cast<float>(v);
  if (!(std::fabs(v) >= 0) || static_cast<double>(f) == v) return f;
  uint32_t bits = std::bit_cast<uint32_t>(f);
  if (std::fabs(static_cast<double>(f)) > std::fabs(v)) --bits;
  return std::bit_cast<float>(bits | 1);
}

inline uint16_t FmaFp16(uint16_t a, uint16_t b, uint16_t c) {
  return FloatToHalf(ToFloatOdd(FmaToOdd(HalfToFloat(a), HalfToFloat(b), HalfToFloat(c))));
}

inline uint16_t FmaBf16(uint16_t a, uint16_t b, uint16_t c) {
  return FloatToBf16(ToFloatOdd(FmaToOdd(Bf16ToFloat(a), Bf16ToFloat(b), Bf16ToFloat(c))));
}

}  // namespace host

// Bitwise function of three words; kLut is the value for (a, b, c) = (0xF0, 0xCC, 0xAA).
template <int kLut>
AWQD_HD uint32_t Lop3(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(kLut));
  return d;
#else
  uint32_t d = 0;
  for (int i = 0; i < 8; ++i) {
    if ((kLut >> i & 1) == 0) continue;
    d |= ((i & 4) ? a : ~a) & ((i & 2) ? b : ~b) & ((i & 1) ? c : ~c);
  }
  return d;
#endif
}

inline constexpr int kAndOr = 0xEA;  // (a & b) | c

// Picks four of the eight bytes of {b, a} (0..3 = a): one selector nibble per result byte, its bit
// 3 replicates the byte's sign instead.
AWQD_HD uint32_t Prmt(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
#else
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> (4 * i) & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (pick & 7))) & 0xff;
    if (pick & 8) byte = (byte & 0x80) ? 0xff : 0;
    d |= byte << (8 * i);
  }
  return d;
#endif
}

// Two fp16 lanes: a * b + c, rounded once.
AWQD_HD uint32_t Fma2Fp16(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  const uint32_t low = host::FmaFp16(a & 0xffff, b & 0xffff, c & 0xffff);
  return low | static_cast<uint32_t>(host::FmaFp16(a >> 16, b >> 16, c >> 16)) << 16;
#endif
}

// Two fp16 lanes: a - b.
AWQD_HD uint32_t Sub2Fp16(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return Fma2Fp16(a, 0x3C003C00, b ^ 0x80008000);
#endif
}

// Two fp16 lanes: a * b. The addend -0 keeps the sign of a zero product.
AWQD_HD uint32_t Mul2Fp16(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return Fma2Fp16(a, b, 0x80008000);
#endif
}

#ifdef __CUDA_ARCH__
// The bits of a float rounded to bf16, to nearest even. sm_75 has no instruction for it.
__device__ __forceinline__ uint32_t RoundToBf16(float v) {
  const uint32_t bits = __float_as_uint(v);
  return isnan(v) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif

// Two bf16 lanes: a * b + c, rounded once. The only bf16 arithmetic of sm_80: sums and products are
// made of it. sm_75 has none; the fma in FP32 there is exact wherever the kernels rely on one
// rounding, as it holds all bits of codes of 8 bits times scales of 11.
AWQD_HD uint32_t Fma2Bf16(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
  const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
  return RoundToBf16(fmaf(low(a), low(b), low(c))) | RoundToBf16(fmaf(high(a), high(b), high(c)))
                                                         << 16;
#elif defined(__CUDA_ARCH__)
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  const uint32_t low = host::FmaBf16(a & 0xffff, b & 0xffff, c & 0xffff);
  return low | static_cast<uint32_t>(host::FmaBf16(a >> 16, b >> 16, c >> 16)) << 16;
#endif
}

inline constexpr uint32_t kOne2Bf16 = 0x3F803F80;
inline constexpr uint32_t kMinusZero2 = 0x80008000;

AWQD_HD uint32_t Sub2Bf16(uint32_t a, uint32_t b) {
  return Fma2Bf16(a, kOne2Bf16, b ^ kMinusZero2);
}
AWQD_HD uint32_t Mul2Bf16(uint32_t a, uint32_t b) { return Fma2Bf16(a, b, kMinusZero2); }

// The bits of one fp16 value as float, exactly.
AWQD_HD float Fp16ToFloat(uint16_t h) {
#ifdef __CUDA_ARCH__
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
#else
  return HalfToFloat(h);
#endif
}

// Two floats to the bits of two fp16 or bf16 lanes (`low` in the low half), round to nearest even.
AWQD_HD uint32_t ToFp16x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  uint16_t halves[2];
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(halves[0]) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(halves[1]) : "f"(high));
  return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
#elif defined(__CUDA_ARCH__)
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
#else
  return FloatToHalf(low) | static_cast<uint32_t>(FloatToHalf(high)) << 16;
#endif
}

AWQD_HD uint32_t ToBf16x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return RoundToBf16(low) | RoundToBf16(high) << 16;
#elif defined(__CUDA_ARCH__)
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
#else
  return FloatToBf16(low) | static_cast<uint32_t>(FloatToBf16(high)) << 16;
#endif
}

}  // namespace awqd::cuda
