// Integer codes of layout mma16 as bytes, the A operand of m16n8k32, and the order of INT8
// activations that belongs to it. Portable bodies: all of it is tested without a GPU.
//
// A lane's codes of a step, 16 of K, are four of row lane / 4 and four of row lane / 4 + 8: of
// in-features 2c, 2c + 8, 2c + 1 and 2c + 9, c = lane % 4, from the lowest byte on. What a step is
// to m16n8k32 does not matter, as long as activations come in the same order.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/packed.cuh"

namespace awqd::cuda {

// The bytes of row lane / 4, and of row lane / 4 + 8.
struct StepBytes {
  uint32_t low, high;
};

AWQD_HD StepBytes Int4Bytes(uint32_t word) { return {word & 0x0f0f0f0fu, word >> 4 & 0x0f0f0f0fu}; }

// A lane's 8 bits of each half on the right, pair p at bit 2 p: pairs 0 and 2 are the lower row's.
AWQD_HD StepBytes Int2Bytes(uint32_t halves) {
  return {(halves & 0x00030003u) | (halves << 4 & 0x03000300u),
          (halves >> 2 & 0x00030003u) | (halves << 2 & 0x03000300u)};
}

// Pair p at bit 2 p + 2 of each half.
AWQD_HD StepBytes Int1Bytes(uint32_t rotated) {
  return {(rotated >> 2 & 0x00010001u) | (rotated << 2 & 0x01000100u),
          (rotated >> 4 & 0x00010001u) | (rotated & 0x01000100u)};
}

AWQD_HD StepBytes Int3Bytes(uint32_t halves, uint32_t rotated) {
  const StepBytes two = Int2Bytes(halves), one = Int1Bytes(rotated);
  return {two.low | one.low << 2, two.high | one.high << 2};
}

// Codes of 5 to 7 bits: `below`, the bytes of their lower bits, with bits [kAt, kAt + kWidth) from
// a word of an upper plane. `place`: 0 .. 7, which bits of the plane's bytes are meant
// (layouts/mma16.cc).
template <int kWidth, int kAt>
AWQD_HD uint32_t WithUpperBits(uint32_t below, uint32_t plane, int place) {
  constexpr uint32_t kMask = (((1u << kWidth) - 1) << kAt) * 0x01010101u;
  const int left = kAt - place * kWidth % 8;
  return Lop3<kAndOr>(left >= 0 ? plane << left : plane >> -left, kMask, below);
}

// 128 - zero in every byte, to be added to codes of up to 7 bits.
AWQD_HD uint32_t BelowZero(uint32_t zero) { return 0x80808080u - zero * 0x01010101u; }

// code - zero as signed bytes, of BelowZero: no byte carries into the next.
AWQD_HD uint32_t MinusZeroBytes(uint32_t codes, uint32_t below) {
  return (codes + below) ^ 0x80808080u;
}

// code - 128 as signed bytes, of codes of 8 bits.
AWQD_HD uint32_t MinusHalfBytes(uint32_t codes) { return codes ^ 0x80808080u; }

inline constexpr int kIntegerRun = 16;         // in-features that are reordered among themselves
inline constexpr int64_t kIntegerBlock = 128;  // rows of x are padded to a multiple

// The in-feature of a run that the prologue puts at place `at`: lane after lane of c.
AWQD_HD constexpr int IntegerSource(int at) { return at / 4 * 2 + at % 4 / 2 + at % 2 * 8; }

}  // namespace awqd::cuda
