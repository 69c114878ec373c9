// Transposes eight words as an 8 x 8 matrix of nibbles or bytes, for packers of codes.
#pragma once

#include <cstdint>

namespace awqd {

// Exchanges the bits `mask` of `a`, shifted up by `shift`, with those of `b`.
template <typename Word, typename Mask>
void SwapBits(Word* a, Word* b, uint32_t shift, Mask mask) {
  const Word differ = ((*a >> shift) ^ *b) & mask;
  *b ^= differ;
  *a ^= differ << shift;
}

// w[r] nibble c <-> w[c] nibble r. Its own inverse. Word is uint32_t for one such matrix, or a
// vector of uint32_t for several side by side.
template <typename Word>
void TransposeNibbles(Word w[8]) {
  for (int r = 0; r < 4; ++r) SwapBits(&w[r], &w[r + 4], 16, 0x0000ffffu);
  for (int r : {0, 1, 4, 5}) SwapBits(&w[r], &w[r + 2], 8, 0x00ff00ffu);
  for (int r : {0, 2, 4, 6}) SwapBits(&w[r], &w[r + 1], 4, 0x0f0f0f0fu);
}

// w[r] byte c <-> w[c] byte r. Its own inverse.
inline void TransposeBytes(uint64_t w[8]) {
  for (int r = 0; r < 4; ++r) SwapBits(&w[r], &w[r + 4], 32, uint64_t{0x00000000ffffffff});
  for (int r : {0, 1, 4, 5}) SwapBits(&w[r], &w[r + 2], 16, uint64_t{0x0000ffff0000ffff});
  for (int r : {0, 2, 4, 6}) SwapBits(&w[r], &w[r + 1], 8, uint64_t{0x00ff00ff00ff00ff});
}

}  // namespace awqd
