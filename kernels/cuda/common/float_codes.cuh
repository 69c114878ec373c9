// Codes that are no integers, to fp16 and bf16: E2M1, E4M3, and indices of a table of 16. Words and
// pairs are those of dequant.cuh. Host bodies give the same bits (packed.cuh).
//
// A floating-point code has its exponent and its mantissa side by side, as fp16 and bf16 have. So
// shifting it to where they begin gives its value times a power of two, denormals included. (OCP
// Microscaling Formats 1.0; OCP 8-bit Floating Point 1.0, whose E4M3 has NaN where exponent and
// mantissa are all ones.)
#pragma once

#include <cstdint>

#include "kernels/cuda/common/dequant.cuh"
#include "kernels/scheme.h"

namespace awqd::cuda {

inline constexpr uint32_t kSigns = 0x80008000;

// ---- E2M1 --------------------------------------------------------------------------------------

// The sign bits of pair `p` of a word of 4-bit codes, where 16-bit numbers have them.
AWQD_HD uint32_t NibbleSigns(uint32_t word, int p) { return word << (12 - 4 * p); }

// Eight codes, exactly. The magnitudes in fp16 have a lower byte of 0; the upper one is looked up:
// four codes are the selector of one Prmt. A byte below 0x80 replicates its sign as 0.
AWQD_HD Pairs E2m1ToFp16(uint32_t word) {
  constexpr uint32_t kBelowTwo = 0x3E3C3800, kFromTwo = 0x46444240;
  const uint32_t magnitudes = word & 0x77777777;
  const uint32_t even = Prmt(kBelowTwo, kFromTwo, magnitudes);
  const uint32_t odd = Prmt(kBelowTwo, kFromTwo, magnitudes >> 16);
  Pairs out;
  AWQD_UNROLL
  for (int p = 0; p < 4; ++p) {
    const uint32_t bytes = Prmt(even, odd, 0x4808 + 0x1111 * p);
    out.v[p] = Lop3<kAndOr>(NibbleSigns(word, p), kSigns, bytes);
  }
  return out;
}

// Eight codes, exactly, or their 64ths: times 2^-126 where they begin, then times 2^126 or 2^120.
template <int kParts = 1>
AWQD_HD Pairs E2m1ToBf16(uint32_t word) {
  static_assert(kParts == 1 || kParts == 64);
  constexpr uint32_t kMagnitudes = 0x01C001C0, kBack = kParts == 1 ? 0x7E807E80 : 0x7B807B80;
  Pairs out;
  AWQD_UNROLL
  for (int p = 0; p < 4; ++p) {
    const uint32_t at = p < 2 ? word << (6 - 4 * p) : word >> (4 * p - 6);
    const uint32_t bits = Lop3<kAndOr>(NibbleSigns(word, p), kSigns, at & kMagnitudes);
    out.v[p] = Mul2Bf16(bits, kBack);
  }
  return out;
}

// The E4M3 codes of the eight magnitudes of E2M1, times a power of two.
struct E4m3Table {
  uint32_t below_two, from_two;
};

// The power of two is `scale`, FP16, over kE2m1UnitE4m3. E4M3 holds the products exactly where the
// scale is in [2^-4, 2^7]; larger ones, and infinities and NaNs, give NaN.
inline constexpr float kE2m1UnitE4m3 = 2;
inline constexpr int kE2m1OctavesE4m3 = 11;
AWQD_HD E4m3Table E2m1TableOf(uint32_t scale) {
  constexpr uint32_t kTop = 22 << 10, kNans = 0x7f7f7f7f;  // 2^7 in FP16
  const uint32_t half = ((scale >> 10) - 10) * 8;          // the code of 0.5
  if (scale > kTop) return {kNans, kNans};
  return {half * 0x01010100 + 0x0c080000, half * 0x01010101 + 0x1c181410};
}

// Eight codes, four of row lane / 4 to out[0] and four of row lane / 4 + 8 to out[1]
// (integers.h).
AWQD_HD void E2m1ToE4m3(uint32_t word, const E4m3Table& low, const E4m3Table& high, uint32_t* out) {
  constexpr uint32_t kByteSigns = 0x80808080;
  const uint32_t first = word & 0x77777777, second = first >> 16;
  const auto look_up = [](const E4m3Table& table, uint32_t four) {
    return Prmt(table.below_two, table.from_two, four);
  };
  const uint32_t lower = Prmt(look_up(low, first), look_up(low, second), 0x6420);
  const uint32_t upper = Prmt(look_up(high, first), look_up(high, second), 0x7531);
  out[0] = Lop3<kAndOr>(word << 4, kByteSigns, lower);
  out[1] = Lop3<kAndOr>(word, kByteSigns, upper);
}

// ---- E4M3 --------------------------------------------------------------------------------------

// 256ths of the codes in the upper bytes of `pair`'s halves. Adding one to a magnitude carries into
// the bit above for NaN alone, which makes an fp16 NaN of it.
AWQD_HD uint32_t E4m3PairToFp16(uint32_t pair) {
  constexpr uint32_t kMagnitudes = 0x3F803F80, kOne = 0x00800080, kCarry = 0x40004000;
  const uint32_t magnitudes = pair >> 1 & kMagnitudes;
  const uint32_t bits = Lop3<kAndOr>(pair, kSigns, magnitudes);
  return Lop3<kAndOr>(magnitudes + kOne, kCarry, bits);
}

// The codes themselves: times 2^-120 where they begin, then times 2^120. The carry of NaN is spread
// over the exponent.
AWQD_HD uint32_t E4m3PairToBf16(uint32_t pair) {
  constexpr uint32_t kMagnitudes = 0x07F007F0, kOne = 0x00100010, kCarry = 0x08000800;
  constexpr uint32_t kSpread = 15, kBack = 0x7B807B80;
  const uint32_t magnitudes = pair >> 4 & kMagnitudes;
  const uint32_t bits = Lop3<kAndOr>(pair, kSigns, magnitudes);
  return Mul2Bf16(bits | ((magnitudes + kOne) & kCarry) * kSpread, kBack);
}

// The bytes e0 e2 e1 e3 of `word` as the pairs (0,1) and (2,3), in the upper bytes.
AWQD_HD uint32_t LowerBytes(uint32_t word) { return word << 8; }
AWQD_HD uint32_t UpperBytes(uint32_t word) { return word; }

// A lane's fragment of one step. `low`: the word of row lane / 4. `high`: that of row lane / 4 + 8.
template <bool kBf16>
AWQD_HD Pairs E4m3ToPairs(uint32_t low, uint32_t high) {
  const auto convert = [](uint32_t pair) {
    return kBf16 ? E4m3PairToBf16(pair) : E4m3PairToFp16(pair);
  };
  Pairs out;
  out.v[0] = convert(LowerBytes(low)), out.v[2] = convert(UpperBytes(low));
  out.v[1] = convert(LowerBytes(high)), out.v[3] = convert(UpperBytes(high));
  return out;
}

// ---- tables ------------------------------------------------------------------------------------

// The table has all pairs of two codes, so that one look-up brings two weights, and a copy of each
// for every lane, 4 bytes in the lane's own bank of shared memory, so that no two lanes meet.
inline constexpr int kPairTableRow = 32 * 4;  // bytes: the copies of one pair
inline constexpr int kPairTableBytes = 256 * kPairTableRow;
constexpr int PairTableBytes(CodeKind code) {
  return code == CodeKind::kTable ? kPairTableBytes : 0;
}

// Where the pairs p of a word of 4-bit codes lie in the table: its row is that of the code at k % 2
// = 0 plus 16 times the other.
AWQD_HD void PairRows(uint32_t word, uint32_t (&rows)[4]) {
  constexpr int kSelect = 0xCA;                        // a ? b : c, bit by bit
  constexpr uint32_t kFirst = 0x0f0f * kPairTableRow;  // of two pairs, eight bits apart
  constexpr uint32_t kRow = 0xff * kPairTableRow;
  const uint32_t even = Lop3<kSelect>(kFirst, word << 7, word >> 5);
  const uint32_t odd = Lop3<kSelect>(kFirst, word << 3, word >> 9);
  rows[0] = even & kRow, rows[1] = odd & kRow;
  rows[2] = even >> 8 & kRow, rows[3] = odd >> 8 & kRow;
}

}  // namespace awqd::cuda
