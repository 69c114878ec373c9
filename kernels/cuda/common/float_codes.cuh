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
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int p = 0; p < 4; ++p) {
    const uint32_t bytes = Prmt(even, odd, 0x4808 + 0x1111 * p);
    out.v[p] = Lop3<kAndOr>(NibbleSigns(word, p), kSigns, bytes);
  }
  return out;
}

// Eight codes, exactly: times 2^-126 where they begin, then times 2^126.
AWQD_HD Pairs E2m1ToBf16(uint32_t word) {
  constexpr uint32_t kMagnitudes = 0x01C001C0, kBack = 0x7E807E80;
  Pairs out;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int p = 0; p < 4; ++p) {
    const uint32_t at = p < 2 ? word << (6 - 4 * p) : word >> (4 * p - 6);
    const uint32_t bits = Lop3<kAndOr>(NibbleSigns(word, p), kSigns, at & kMagnitudes);
    out.v[p] = Mul2Bf16(bits, kBack);
  }
  return out;
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

// ---- tables ------------------------------------------------------------------------------------

// 16 numbers of 16 bits: their upper and their lower bytes.
struct ByteTables {
  uint32_t upper[4], lower[4];
};

AWQD_HD void SetEntry(ByteTables* tables, int i, uint32_t bits) {
  tables->upper[i / 4] |= (bits >> 8 & 255) << i % 4 * 8;
  tables->lower[i / 4] |= (bits & 255) << i % 4 * 8;
}

// The bytes of four codes, the lower 16 bits of `low`, their lower three bits. `above`: 255 in the
// bytes of those from 8 on.
AWQD_HD uint32_t LookUpBytes(const uint32_t (&table)[4], uint32_t low, uint32_t above) {
  constexpr int kSelect = 0xCA;  // a ? b : c, bit by bit
  return Lop3<kSelect>(above, Prmt(table[2], table[3], low), Prmt(table[0], table[1], low));
}

// Eight codes of a word.
AWQD_HD Pairs LookUp(const ByteTables& tables, uint32_t word) {
  constexpr uint32_t kNoneOrAll = 0x80808080;  // bytes 4 to 7 of a Prmt with 0
  const uint32_t low = word & 0x77777777;
  // Selectors of the sign of byte 0 or 4.
  const uint32_t signs = (word >> 1 & 0x44444444) | 0x88888888;
  uint32_t entries[2][2];  // of even and odd: two numbers in each
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int half = 0; half < 2; ++half) {
    const uint32_t above = Prmt(0, kNoneOrAll, signs >> 16 * half);
    const uint32_t upper = LookUpBytes(tables.upper, low >> 16 * half, above);
    const uint32_t lower = LookUpBytes(tables.lower, low >> 16 * half, above);
    entries[half][0] = Prmt(lower, upper, 0x5140);
    entries[half][1] = Prmt(lower, upper, 0x7362);
  }
  return {{Prmt(entries[0][0], entries[1][0], 0x5410), Prmt(entries[0][0], entries[1][0], 0x7632),
           Prmt(entries[0][1], entries[1][1], 0x5410), Prmt(entries[0][1], entries[1][1], 0x7632)}};
}

}  // namespace awqd::cuda
