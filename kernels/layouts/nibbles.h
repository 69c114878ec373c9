// Eight 32-bit words as an 8 x 8 matrix of nibbles: what packers of 4-bit codes turn around.
#pragma once

#include <cstdint>

namespace awqd {

// Exchanges the bits `mask` of `a`, moved up by `shift`, with those of `b`.
inline void SwapBits(uint32_t* a, uint32_t* b, int shift, uint32_t mask) {
  const uint32_t differ = ((*a >> shift) ^ *b) & mask;
  *b ^= differ;
  *a ^= differ << shift;
}

// w[r] nibble c <-> w[c] nibble r. Its own inverse.
inline void TransposeNibbles(uint32_t w[8]) {
  for (int r = 0; r < 4; ++r) SwapBits(&w[r], &w[r + 4], 16, 0x0000ffffu);
  for (int r : {0, 1, 4, 5}) SwapBits(&w[r], &w[r + 2], 8, 0x00ff00ffu);
  for (int r : {0, 2, 4, 6}) SwapBits(&w[r], &w[r + 1], 4, 0x0f0f0f0fu);
}

}  // namespace awqd
