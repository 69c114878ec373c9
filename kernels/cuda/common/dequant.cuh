// Integer codes to fp16 and bf16 by bit tricks, exact at every step until the one rounding of the
// scale; and the 4-bit codes of KV4.
//
// Why it works: an fp16 whose exponent field is 0x64 is 1024 + its ten mantissa bits, so OR-ing a
// code into 0x6400 makes 1024 + code with no conversion; a code four bits higher makes 1024 + 16
// code. bf16 has seven mantissa bits: 0x4300 makes 128 + code and there is no high form. fp32
// 0x4B000000 makes 2^23 + code.
//
// The nibble order of a 4-bit word is e0 e2 e4 e6 e1 e3 e5 e7 (least significant first), so that
// one mask yields the pairs (e0, e1), (e2, e3) and, after a shift by 8, (e4, e5), (e6, e7). An
// 8-bit word holds e0 e2 e1 e3. "Pair" is a 32-bit word of two 16-bit lanes, the first element in
// the low half.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/packed.cuh"
#include "kernels/kv4_math.h"

namespace awqd::cuda {

// Eight decoded values as four pairs (0,1) (2,3) (4,5) (6,7).
struct Pairs {
  uint32_t v[4];
};

// Both halves of a word set to the 16 bits `h`.
AWQD_HD uint32_t Both(uint32_t h) { return h * 0x00010001u; }

// ---- 4 bits to fp16 ----------------------------------------------------------------------------

// Where a pair's two codes lie in a word.
inline constexpr uint32_t kLowCodes = 0x000f000f, kHighCodes = 0x00f000f0;

// Two zero points come in one byte, repeated in both halves of a word. The decode subtracts the
// lower one from pairs 0 and 2 as 1024 + z. Codes of pairs 1 and 3 arrive times 16, so it adds the
// upper one to them as -(64 + z). Both forms are exact in fp16.
AWQD_HD uint32_t LowZeroFp16(uint32_t zeros) { return Lop3<kAndOr>(zeros, kLowCodes, 0x64006400); }
AWQD_HD uint32_t HighZeroFp16(uint32_t zeros) {
  return Lop3<kAndOr>(zeros, kHighCodes, 0xD400D400);
}

// q - z of eight codes, exactly. `zeros`: per pair, forms low, high, low, high. 9 operations; 13
// with the scale.
AWQD_HD Pairs Int4MinusZeroFp16(uint32_t word, const uint32_t (&zeros)[4]) {
  constexpr uint32_t kExponent = 0x64006400, kSixteenth = 0x2C002C00;
  const uint32_t upper = word >> 8;
  return {{Sub2Fp16(Lop3<kAndOr>(word, kLowCodes, kExponent), zeros[0]),
           Fma2Fp16(Lop3<kAndOr>(word, kHighCodes, kExponent), kSixteenth, zeros[1]),
           Sub2Fp16(Lop3<kAndOr>(upper, kLowCodes, kExponent), zeros[2]),
           Fma2Fp16(Lop3<kAndOr>(upper, kHighCodes, kExponent), kSixteenth, zeros[3])}};
}

// round(v * s) of each value: `scales` holds the pairs of s.
AWQD_HD Pairs ScaleFp16(Pairs values, const uint32_t (&scales)[4]) {
  AWQD_UNROLL
  for (int i = 0; i < 4; ++i) values.v[i] = Mul2Fp16(values.v[i], scales[i]);
  return values;
}

// ---- 4 bits to bf16 ----------------------------------------------------------------------------

// A code on its own is a bf16 already: with an exponent field of 0 or 1 the lower eight bits count
// multiples of 2^-133. The largest power of two, 2^127, makes q / 64 of it, and 2^123 does where
// the code lies four bits higher. So zero points are -z / 64 here and scales 64 s.
inline constexpr uint32_t kFromLowBf16 = 0x7F007F00, kFromHighBf16 = 0x7D007D00;

// -z / 64 of the lower and the upper of a byte's two zero points, which are in both halves.
AWQD_HD uint32_t LowZeroBf16(uint32_t zeros) {
  return Mul2Bf16(zeros & kLowCodes, kFromLowBf16 | kMinusZero2);
}
AWQD_HD uint32_t HighZeroBf16(uint32_t zeros) {
  return Mul2Bf16(zeros & kHighCodes, kFromHighBf16 | kMinusZero2);
}

// (q - z) / 64 of eight codes, exactly, `zeros` per pair as -z / 64. 9 operations; 17 with the
// scale.
AWQD_HD Pairs Int4MinusZeroBf16(uint32_t word, const uint32_t (&zeros)[4]) {
  const uint32_t upper = word >> 8;
  return {{Fma2Bf16(word & kLowCodes, kFromLowBf16, zeros[0]),
           Fma2Bf16(word & kHighCodes, kFromHighBf16, zeros[1]),
           Fma2Bf16(upper & kLowCodes, kFromLowBf16, zeros[2]),
           Fma2Bf16(upper & kHighCodes, kFromHighBf16, zeros[3])}};
}

// 64 times an fp16 scale as the exact sum of two bf16, each in both halves of a word: `high` its
// upper 8 significant bits, `low` the 3 that remain. For infinity and NaN `low` is any finite
// number.
struct SplitScale {
  uint32_t high;
  uint32_t low;
};

AWQD_HD SplitScale SplitToBf16(uint16_t scale) {
  constexpr float kFinite = 0x1p100f;
  const float s = Fp16ToFloat(scale) * 64;
#ifdef __CUDA_ARCH__
  const uint32_t bits = __float_as_uint(s);
  const float rest = fminf(s - __uint_as_float(bits & 0xffff0000u), kFinite);
  const uint32_t rest_bits = __float_as_uint(rest);
#else
  const uint32_t bits = std::bit_cast<uint32_t>(s);
  const float rest = std::fmin(s - std::bit_cast<float>(bits & 0xffff0000u), kFinite);
  const uint32_t rest_bits = std::bit_cast<uint32_t>(rest);
#endif
  return {Prmt(bits, 0, 0x3232), Prmt(rest_bits, 0, 0x3232)};
}

// round(v * s) of each value v = (q - z) / 64, for s split into high + low. Codes of up to 4 bits
// are rounded once although s has more bits than bf16: v * low has at most 7 significant bits and
// is exact, so the last operation adds it to an exact product and rounds their true sum. With 8
// bits the result may be off by a 2^-9th of the low part, a 2^-8th of the scale.
AWQD_HD Pairs ScaleBf16(Pairs values, const uint32_t (&high)[4], const uint32_t (&low)[4]) {
  AWQD_UNROLL
  for (int i = 0; i < 4; ++i) {
    values.v[i] = Fma2Bf16(values.v[i], high[i], Mul2Bf16(values.v[i], low[i]));
  }
  return values;
}

// ---- 1, 2 and 3 bits ---------------------------------------------------------------------------

// A word holds pairs too, the second code 16 bits above the first. 2-bit codes of pair p lie at bit
// 2p of a step's 8 bits of each half. 1-bit codes lie at bit 2p + 2 after a rotation. A 3-bit code
// has its lower two bits like a 2-bit code and its upper bit like a 1-bit code.
AWQD_HD constexpr uint32_t TwoBits(int p) { return 0x00030003u << 2 * p; }
AWQD_HD constexpr uint32_t OneBit(int p) { return 0x00040004u << 2 * p; }
// 4^-p, as fp16 pairs.
AWQD_HD constexpr uint32_t QuartersFp16(int p) { return 0x3C003C00u - 0x08000800u * p; }
// 2^127 4^-p, as bf16 pairs: what makes q / 64 of a code that lies 2 p bits high.
AWQD_HD constexpr uint32_t FromBf16(int p) { return 0x7F007F00u - 0x01000100u * p; }

// Zeros of a byte of two zero points (lower: row r, upper: row r + 8), in both halves of `both`, as
// pair p takes them: 1024 + z for p = 0 of 2 and 3 bits, else -(1024 4^-p + z), and of 1 bit
// -(1024 4^-(p + 1) + z). Exact for z below 8.
AWQD_HD void PairZerosFp16(uint32_t both, uint32_t (&zeros)[4]) {
  const uint32_t low = both & kLowCodes, high = both & kHighCodes;
  zeros[0] = low | 0x64006400;
  zeros[1] = high >> 2 | 0xDC00DC00;
  zeros[2] = low << 4 | 0xD400D400;
  zeros[3] = high << 2 | 0xCC00CC00;
}
AWQD_HD void BitZerosFp16(uint32_t both, uint32_t (&zeros)[4]) {
  const uint32_t low = both & kLowCodes, high = both & kHighCodes;
  zeros[0] = low << 2 | 0xDC00DC00;
  zeros[1] = high | 0xD400D400;
  zeros[2] = low << 6 | 0xCC00CC00;
  zeros[3] = high << 4 | 0xC400C400;
}

// The pairs of one step, q with its place value in an fp16 of exponent 1024. `low`: the step's 8
// bits of each half on the right.
AWQD_HD Pairs Int2PlusBias(uint32_t low) {
  Pairs out;
  AWQD_UNROLL
  for (int p = 0; p < 4; ++p) out.v[p] = Lop3<kAndOr>(low, TwoBits(p), 0x64006400);
  return out;
}
AWQD_HD Pairs Int1PlusBias(uint32_t rotated) {
  Pairs out;
  AWQD_UNROLL
  for (int p = 0; p < 4; ++p) out.v[p] = Lop3<kAndOr>(rotated, OneBit(p), 0x64006400);
  return out;
}
AWQD_HD Pairs Int3PlusBias(uint32_t low, uint32_t rotated) {
  Pairs out = Int1PlusBias(rotated);
  AWQD_UNROLL
  for (int p = 0; p < 4; ++p) out.v[p] = Lop3<kAndOr>(low, TwoBits(p), out.v[p]);
  return out;
}

// q - z, exactly, of what the three above return; zeros of PairZerosFp16 for 2 and 3 bits (kFirst
// 0) and of BitZerosFp16 for 1 (kFirst 1).
template <int kFirst>
AWQD_HD Pairs MinusZeroFp16(Pairs biased, const uint32_t (&zeros)[4]) {
  AWQD_UNROLL
  for (int p = 0; p < 4; ++p) {
    biased.v[p] = p + kFirst == 0 ? Sub2Fp16(biased.v[p], zeros[p])
                                  : Fma2Fp16(biased.v[p], QuartersFp16(p + kFirst), zeros[p]);
  }
  return biased;
}

// (q - z) / 64 of one step, exactly; `zeros` per pair as -z / 64.
AWQD_HD Pairs Int2MinusZeroBf16(uint32_t low, const uint32_t (&zeros)[4]) {
  Pairs out;
  AWQD_UNROLL
  for (int p = 0; p < 4; ++p) out.v[p] = Fma2Bf16(low & TwoBits(p), FromBf16(p), zeros[p]);
  return out;
}
// The bit of pair 3 is a bf16 of exponent field 2 and no mantissa: still 2^8 times the unit.
AWQD_HD Pairs Int1MinusZeroBf16(uint32_t rotated, const uint32_t (&zeros)[4]) {
  Pairs out;
  AWQD_UNROLL
  for (int p = 0; p < 4; ++p) {
    out.v[p] = Fma2Bf16(rotated & OneBit(p), FromBf16(p + 1), zeros[p]);
  }
  return out;
}
AWQD_HD Pairs Int3MinusZeroBf16(uint32_t low, uint32_t rotated, const uint32_t (&zeros)[4]) {
  Pairs out;
  AWQD_UNROLL
  for (int p = 0; p < 4; ++p) {
    uint32_t codes = Lop3<kAndOr>(low, TwoBits(p), rotated & OneBit(p));
    // The upper bit of pair 3 lies above the bits that a bf16 denormal has.
    if (p == 3) codes >>= 6;
    out.v[p] = Fma2Bf16(codes, FromBf16(p == 3 ? 0 : p), zeros[p]);
  }
  return out;
}

// ---- 8 bits ------------------------------------------------------------------------------------

// q - z of the pairs (0,1) and (2,3), exactly; `zero`: 1024 + z. q, z in 0..255.
AWQD_HD void Int8MinusZeroFp16(uint32_t word, uint32_t zero, uint32_t (&out)[2]) {
  const uint32_t first = Prmt(word, 0x64646464, 0x5250), second = Prmt(word, 0x64646464, 0x5351);
  out[0] = Sub2Fp16(first, zero);
  out[1] = Sub2Fp16(second, zero);
}

// A byte on its own is a bf16 as well: q 2^-133, and 2^127 makes q / 64 of it. So (q - z) / 64 of
// the pairs (0,1) and (2,3) of a word, exactly, for 4 operations where the way through fp32 takes
// ten. `zero`: -z / 64.
AWQD_HD void Int8MinusZeroBf16(uint32_t word, uint32_t zero, uint32_t (&out)[2]) {
  out[0] = Fma2Bf16(word & 0x00ff00ff, kFromLowBf16, zero);
  out[1] = Fma2Bf16(Prmt(word, 0, 0x4341), kFromLowBf16, zero);
}

// A zero point of 8 bits, in both halves of `both`, as Int8MinusZeroFp16 and Int8MinusZeroBf16
// take it.
AWQD_HD uint32_t ByteZeroFp16(uint32_t both) { return both | 0x64006400; }
AWQD_HD uint32_t ByteZeroBf16(uint32_t both) { return Mul2Bf16(both, kFromLowBf16 | kMinusZero2); }

// ---- KV4 ---------------------------------------------------------------------------------------

// A code is the low bits of 2^23 + code.
AWQD_HD float Kv4CodeToFloat(uint32_t code) {
  return kv4::Add(kv4::FloatOf(0x4B000000u | code), -0x1p23f);
}

// QServe's fused form of 8 codes in sequence, element 0 in the lowest bits: fma(u, factor, addend)
// in FP16. `factor` and `addend` hold their number twice. One mask finds the pairs (0, 4), (1, 5),
// (2, 6) and (3, 7), which are put in order at the end. 17 operations.
AWQD_HD Pairs FusedKv4Word(uint32_t word, uint32_t factor, uint32_t addend) {
  constexpr uint32_t kLowZero = 0x64006400, kHighZero = 0xD400D400;  // 1024 and -64
  constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;
  const Pairs u = Int4MinusZeroFp16(word, {kLowZero, kHighZero, kLowZero, kHighZero});
  const uint32_t v04 = Fma2Fp16(u.v[0], factor, addend), v15 = Fma2Fp16(u.v[1], factor, addend);
  const uint32_t v26 = Fma2Fp16(u.v[2], factor, addend), v37 = Fma2Fp16(u.v[3], factor, addend);
  return {{Prmt(v04, v15, kLowHalves), Prmt(v26, v37, kLowHalves), Prmt(v04, v15, kHighHalves),
           Prmt(v26, v37, kHighHalves)}};
}

}  // namespace awqd::cuda
