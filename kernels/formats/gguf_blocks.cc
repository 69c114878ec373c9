// Blocks of GGUF, byte by byte. Numbers of two bytes are little endian.
// Facts: ggml, ggml-common.h and ggml-quants.c; PyPI gguf, quants.py.
#include "kernels/formats/gguf_blocks.h"

#include <cstring>

#include "kernels/base/half.h"

namespace awqd {
namespace {

uint16_t Half(const uint8_t* from) { return static_cast<uint16_t>(from[0] | from[1] << 8); }
bool IsFinite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

void Store(uint8_t* to, int64_t index, float value) {
  std::memcpy(to + index * sizeof(value), &value, sizeof(value));
}
void Store(uint8_t* to, uint16_t half) { std::memcpy(to, &half, sizeof(half)); }

// --- Codes: 32 of a run ---

// Two to a byte: the first 16 in the low halves of 16 bytes, the others in the high halves.
void Nibbles(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 16; ++i) {
    to[i] = from[i] & 15;
    to[i + 16] = from[i] >> 4;
  }
}

// The nibbles stand behind the scales.
template <int kAt>
void NibblesAt(const uint8_t* block, int /*run*/, uint8_t* to) {
  Nibbles(block + kAt, to);
}

// Bit i of the four bytes at kAt is the fifth of code i; nibbles follow.
template <int kAt>
void FiveBitsAt(const uint8_t* block, int /*run*/, uint8_t* to) {
  Nibbles(block + kAt + 4, to);
  for (int i = 0; i < 32; ++i) {
    to[i] = static_cast<uint8_t>(to[i] | (block[kAt + i / 8] >> (i % 8) & 1) << 4);
  }
}

void SignedBytes(const uint8_t* block, int /*run*/, uint8_t* to) {
  for (int i = 0; i < 32; ++i) to[i] = block[2 + i] ^ 0x80;  // + 128
}

// The low or the high halves of 32 bytes, in turn.
void HalvesInTurn(const uint8_t* from, int run, uint8_t* to) {
  for (int i = 0; i < 32; ++i) to[i] = from[run / 2 * 32 + i] >> (4 * (run % 2)) & 15;
}

void RunOfQ4K(const uint8_t* block, int run, uint8_t* to) { HalvesInTurn(block + 16, run, to); }

// Bit r of 32 bytes are the fifth bits of run r.
void RunOfQ5K(const uint8_t* block, int run, uint8_t* to) {
  HalvesInTurn(block + 48, run, to);
  for (int i = 0; i < 32; ++i) {
    to[i] = static_cast<uint8_t>(to[i] | (block[16 + i] >> run & 1) << 4);
  }
}

// Of each half of a block: 64 bytes whose low halves are runs 0 and 1 and whose high halves are
// runs 2 and 3; 32 bytes with the two upper bits of each.
void RunOfQ6K(const uint8_t* block, int run, uint8_t* to) {
  const int half = run / 4, in_half = run % 4;
  const uint8_t* const low = block + half * 64 + in_half % 2 * 32;
  const uint8_t* const high = block + 128 + half * 32;
  for (int i = 0; i < 32; ++i) {
    to[i] = static_cast<uint8_t>((low[i] >> (in_half / 2 * 4) & 15) | (high[i] >> (2 * in_half) & 3)
                                                                          << 4);
  }
}

// Code 8 is a negative zero in E2M1, and zero here.
void RunOfMxfp4(const uint8_t* block, int /*run*/, uint8_t* to) {
  Nibbles(block + 1, to);
  for (int i = 0; i < 32; ++i) to[i] = to[i] == 8 ? 0 : to[i];
}

// --- Scales and zeros ---

bool OneScale(const uint8_t* block, uint8_t* scales, uint8_t* /*zeros*/) {
  const uint16_t d = Half(block);
  Store(scales, d);
  return IsFinite(d);
}

// The zero is taken away: m with the other sign.
bool ScaleAndMinimum(const uint8_t* block, uint8_t* scales, uint8_t* zeros) {
  const uint16_t d = Half(block), m = Half(block + 2);
  Store(scales, d);
  Store(zeros, static_cast<uint16_t>(m ^ 0x8000));
  return IsFinite(d) && IsFinite(m);
}

// Eight scales and eight minima of 6 bits in 12 bytes: those of groups 0 to 3 in the low bits of
// four bytes each; of groups 4 to 7 four bits in the last four bytes, two in the upper bits of the
// others.
int SixBits(const uint8_t* packed, int group, bool minimum) {
  const int at = group % 4 + (minimum ? 4 : 0);
  if (group < 4) return packed[at] & 63;
  const int low = packed[8 + group % 4] >> (minimum ? 4 : 0) & 15;
  return low | (packed[at] >> 6) << 4;
}

bool ScalesAndMinimaOfK(const uint8_t* block, uint8_t* scales, uint8_t* zeros) {
  const uint16_t d = Half(block), dmin = Half(block + 2);
  const float scale = HalfToFloat(d), minimum = HalfToFloat(dmin);
  for (int group = 0; group < 8; ++group) {
    Store(scales, group, scale * static_cast<float>(SixBits(block + 4, group, false)));
    Store(zeros, group, minimum * static_cast<float>(SixBits(block + 4, group, true)));
  }
  return IsFinite(d) && IsFinite(dmin);
}

bool ScalesOfQ6K(const uint8_t* block, uint8_t* scales, uint8_t* /*zeros*/) {
  const uint16_t d = Half(block + 208);
  for (int group = 0; group < 16; ++group) {
    const auto integer = static_cast<int8_t>(block[192 + group]);
    Store(scales, group, HalfToFloat(d) * static_cast<float>(integer));
  }
  return IsFinite(d);
}

bool Exponent(const uint8_t* block, uint8_t* scales, uint8_t* /*zeros*/) {
  scales[0] = block[0];
  return block[0] != 0xff;
}

// --- The table ---

constexpr GgufBlock Constant(absl::string_view name, int64_t bytes, int bits) {
  return {.name = name, .bytes = bytes, .bits = bits, .zero = 1 << (bits - 1), .cells = OneScale};
}

constexpr GgufBlock WithMinimum(absl::string_view name, int64_t bytes, int bits) {
  return {.name = name,
          .bytes = bytes,
          .bits = bits,
          .zero_kind = ZeroKind::kRealAfter,
          .cells = ScaleAndMinimum};
}

constexpr GgufBlock SuperBlock(absl::string_view name, int64_t bytes, int bits) {
  return {.name = name,
          .codes = 256,
          .bytes = bytes,
          .bits = bits,
          .zero_kind = ZeroKind::kRealAfter,
          .zero_dtype = DType::kFp32,
          .scale_dtype = DType::kFp32,
          .cells = ScalesAndMinimaOfK};
}

constexpr GgufBlock With(GgufBlock block, void (*run)(const uint8_t*, int, uint8_t*)) {
  block.run = run;
  return block;
}

constexpr GgufBlock kBlocks[] = {
    With(Constant("Q4_0", 18, 4), NibblesAt<2>),
    With(WithMinimum("Q4_1", 20, 4), NibblesAt<4>),
    With(Constant("Q5_0", 22, 5), FiveBitsAt<2>),
    With(WithMinimum("Q5_1", 24, 5), FiveBitsAt<4>),
    With(Constant("Q8_0", 34, 8), SignedBytes),
    With(SuperBlock("Q4_K", 144, 4), RunOfQ4K),
    With(SuperBlock("Q5_K", 176, 5), RunOfQ5K),
    {.name = "Q6_K",
     .codes = 256,
     .bytes = 210,
     .group = 16,
     .bits = 6,
     .zero = 32,
     .scale_dtype = DType::kFp32,
     .run = RunOfQ6K,
     .cells = ScalesOfQ6K},
    {.name = "MXFP4",
     .bytes = 17,
     .code = CodeKind::kE2m1,
     .scale_dtype = DType::kE8m0,
     .run = RunOfMxfp4,
     .cells = Exponent},
};

}  // namespace

absl::Span<const GgufBlock> GgufBlocks() { return kBlocks; }

}  // namespace awqd
