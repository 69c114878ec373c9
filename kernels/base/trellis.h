// Trellis codes: tiles of 16 x 16 elements, each of which is an entry of a codebook of 65536. Its
// index, the state, is the last 16 of the tile's bits up to its own code of 1 to 8 bits. The bits
// form a ring, so the first states end with bits from the tile's end.
//
//   code         entry of state s, rounded once to FP16
//   trellis      3INST: x = 89226354 s + 64248484 mod 2^32, sum of the halves of y
//   trellis..mcg     x = 0xcbac1fed s mod 2^32, sum of the halves of y
//   trellis..mul1    x = 0x83dcd12d s mod 2^32, (1024 + sum of the bytes of x) * 1774 / 2^18
//                                               - 1329 / 2^7
//
// where y = (x and 0x8fff8fff) xor 0x3b603b60 is two FP16 numbers.
//
// Tiles [K / 16, N / 16] have 32 * bits bytes: words of 32 bits, little endian, the first code in
// the highest bits. Codes are in the order of a tensor core's operand: code 8 l + i is element
// (2 (l % 4) + i % 2 + 8 (i / 2 % 2), l / 4 + 8 (i / 4)) of the tile.
//
// An element of W is made of the entries of its row in 128 columns, multiplied by Sylvester's
// Hadamard matrix times 1 / sqrt(128): butterflies in FP32, as TransformBlock of exact.h.
//
// Source: exllamav3 1.4.1, exllamav3_ext/quant/codebook.cuh, exl3_dq.cuh, pack.cu, reconstruct.cu.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace awqd {

inline constexpr int kTrellisTile = 16;                  // rows and columns of a tile
inline constexpr int kTrellisColumns = 128;              // that are transformed together
inline constexpr float kTrellisScale = 0.088388347648f;  // 1 / sqrt(128)

enum class TrellisCode : uint8_t { kNone, k3Inst, kMcg, kMul1 };
inline constexpr TrellisCode kTrellisCodes[] = {TrellisCode::k3Inst, TrellisCode::kMcg,
                                                TrellisCode::kMul1};
// The end of a scheme's name, after "trellis" and the bits: "", "mcg", "mul1".
absl::string_view Suffix(TrellisCode code);

// The multipliers of codes that checkpoints name by them.
inline constexpr uint32_t kMcgMultiplier = 0xcbac1fed, kMul1Multiplier = 0x83dcd12d;

// A normal FP16 number from 2^-3 to below 2, in units of 2^-13.
constexpr int32_t TrellisHalf(uint32_t bits) {
  const int32_t magnitude =
      static_cast<int32_t>((1024 + (bits & 1023)) << ((bits >> 10 & 31) - 12));
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// An entry before it is rounded, as a multiple of TrellisUnit. FP32 holds it exactly.
constexpr int32_t TrellisSum(TrellisCode code, uint32_t state) {
  if (code == TrellisCode::kMul1) {
    const uint32_t x = state * kMul1Multiplier;
    const uint32_t bytes = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24);
    return static_cast<int32_t>(1024 + bytes) * 1774 - 1329 * 2048;
  }
  const uint32_t x =
      code == TrellisCode::kMcg ? state * kMcgMultiplier : state * 89226354u + 64248484u;
  const uint32_t y = (x & 0x8fff8fffu) ^ 0x3b603b60u;
  return TrellisHalf(y & 0xffff) + TrellisHalf(y >> 16);
}
constexpr float TrellisUnit(TrellisCode code) {
  return code == TrellisCode::kMul1 ? 0x1p-18f : 0x1p-13f;
}

// The place of a code in its tile.
constexpr int TrellisRow(int code) { return code / 8 % 4 * 2 + code % 2 + code / 2 % 2 * 8; }
constexpr int TrellisColumn(int code) { return code / 32 + code / 4 % 2 * 8; }

// On the host: the entries of all states, 65536 FP32, which live as long as the process.
const float* TrellisEntries(TrellisCode code);

// On the host: the entries of a tile. Element (row, column) goes to
// out[row * row_stride + column * column_stride].
void DecodeTile(TrellisCode code, int bits, const uint8_t* tile, int64_t row_stride,
                int64_t column_stride, float* out);

}  // namespace awqd
