// Transposes small matrices of bytes in registers, for packers of codes.
#pragma once

#include <cstdint>
#include <utility>

namespace awqd {

// Exchanges the bits `mask` of `a`, shifted up by `shift`, with those of `b`.
template <typename Word, typename Mask>
void SwapBits(Word* a, Word* b, uint32_t shift, Mask mask) {
  const Word differ = ((*a >> shift) ^ *b) & mask;
  *b ^= differ;
  *a ^= differ << shift;
}

// w[r] byte c <-> w[c] byte r. Its own inverse.
inline void TransposeBytes(uint64_t w[8]) {
  for (int r = 0; r < 4; ++r) SwapBits(&w[r], &w[r + 4], 32, uint64_t{0x00000000ffffffff});
  for (int r : {0, 1, 4, 5}) SwapBits(&w[r], &w[r + 2], 16, uint64_t{0x0000ffff0000ffff});
  for (int r : {0, 2, 4, 6}) SwapBits(&w[r], &w[r + 1], 8, uint64_t{0x00ff00ff00ff00ff});
}

// 16 bytes, the vector that every machine here has.
using Bytes16 = uint8_t __attribute__((vector_size(16)));

// Pieces of kBytes bytes of `a` and `b` in turn, from byte `first` of both on.
template <int kBytes, int first, int... i>
Bytes16 InterleaveFrom(Bytes16 a, Bytes16 b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(
      a, b, (first + i / kBytes % 2 * 16 + i / kBytes / 2 * kBytes + i % kBytes)...);
}
template <int kBytes>
void Interleave(Bytes16 a, Bytes16 b, Bytes16* low, Bytes16* high) {
  constexpr auto kAll = std::make_integer_sequence<int, 16>();
  *low = InterleaveFrom<kBytes, 0>(a, b, kAll);
  *high = InterleaveFrom<kBytes, 8>(a, b, kAll);
}

// w[r] byte c <-> w[c] byte r, for 16 vectors of 16 bytes. Its own inverse. Each of four rounds
// interleaves vector i with vector i + 8, which turns the bits of a byte's number (its row, then its
// column) round by one.
inline void TransposeBytes(Bytes16 w[16]) {
  for (int round = 0; round < 4; ++round) {
    Bytes16 next[16];
    for (int i = 0; i < 8; ++i) Interleave<1>(w[i], w[i + 8], &next[2 * i], &next[2 * i + 1]);
    for (int i = 0; i < 16; ++i) w[i] = next[i];
  }
}

}  // namespace awqd
