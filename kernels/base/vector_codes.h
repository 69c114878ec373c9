// Vector codes: eight elements along K are one code, an index of a point of a codebook with signs
// or an offset. A block has 256 elements of a column; its numbers of two bytes are little endian.
//
//   code      bytes  an index          signs, offset                scale
//   iq2_xxs      66   8 bits for 8     7, the eighth makes an even   d * (1/2 + s) / 4 for 32
//   iq2_xs       74   9 bits for 8     number of minus signs                       for 16
//   iq2_s        82  10 bits for 8     8                                           for 16
//   iq3_xxs      98   8 bits for 4     7, the eighth as above       d * (1/2 + s) / 2 for 32
//   iq3_s       110   9 bits for 4     8                            d * (1 + 2 s) for 32
//   iq1_s        50  11 bits for 8     1 / 8 or -1 / 8 for 32       d * (1 + 2 s) for 32
//   iq1_m        56  11 bits for 8     1 / 8 or -1 / 8 for 8        d * (1 + 2 s) for 16
//
// d is FP16; s has 4 bits, of iq1 3. Points of iq2 are of 8, 25 and 43, of iq3_xxs of 4, 12, 20, 28,
// 36, 44, 52 and 62, of iq3_s of 1, 3 .. 15, of iq1 of -1, 0 and 1. An element is point * scale, of
// iq1 (point + offset) * scale, exactly in FP32: it has at most 22 bits.
//
// Source: ggml, ggml-common.h and ggml-quants.c; PyPI gguf 0.19.0, quants.py. codebooks.h has the
// points and decodes eight elements.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace awqd {

inline constexpr int kVectorBlock = 256;  // elements of a block
// Elements that share a scale at least.
inline constexpr int kVectorGroup = 16;

enum class VectorCode : uint8_t { kNone, kIq2Xxs, kIq2Xs, kIq2S, kIq3Xxs, kIq3S, kIq1S, kIq1M };
inline constexpr int kVectorBlockBytes[] = {0, 66, 74, 82, 98, 110, 50, 56};  // of each
constexpr int VectorBlockBytes(VectorCode code) {
  return kVectorBlockBytes[static_cast<int>(code)];
}

// Elements are products of a code and its scale, exact in FP32.
struct DecodedBlock {
  alignas(64) int8_t codes[kVectorBlock];
  float scales[kVectorBlock / kVectorGroup];

  float Element(int64_t i) const { return static_cast<float>(codes[i]) * scales[i / kVectorGroup]; }
};

struct VectorCodeInfo {
  VectorCode code = VectorCode::kNone;
  absl::string_view name;  // "iq2_xxs"
  // The FP16 bits of a block's d.
  uint16_t (*scale)(const uint8_t* block) = nullptr;
  void (*decode)(const uint8_t* block, DecodedBlock* out) = nullptr;
};

// One for each kind but kNone.
absl::Span<const VectorCodeInfo> VectorCodes();
// For kNone all is null.
const VectorCodeInfo& InfoOf(VectorCode code);

}  // namespace awqd
