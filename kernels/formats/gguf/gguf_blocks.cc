// Blocks of GGUF, byte by byte. Numbers of two bytes are little endian.
// Facts: ggml, ggml-common.h and ggml-quants.c; PyPI gguf, quants.py.
#include "kernels/formats/gguf/gguf_blocks.h"

#include <cstring>

#include "kernels/base/half.h"
#include "kernels/formats/codes.h"

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

// Those of the runs follow one another.
template <int kAt>
void NibblesAt(const uint8_t* block, int run, uint8_t* to) {
  Nibbles(block + kAt + 16 * run, to);
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

// Code i of the run: 32 bytes have a code each of some runs, those of the first run in the lowest
// bits; then 32 bytes of the next runs follow.
template <int kBits>
int InTurn(const uint8_t* from, int run, int i) {
  constexpr int kRuns = 8 / kBits;
  return from[run / kRuns * 32 + i] >> (run % kRuns * kBits) & ((1 << kBits) - 1);
}

template <int kBits, int kAt>
void CodesInTurn(const uint8_t* block, int run, uint8_t* to) {
  for (int i = 0; i < 32; ++i) to[i] = static_cast<uint8_t>(InTurn<kBits>(block + kAt, run, i));
}

// The highest bit of each code stands apart, at kTop.
template <int kLowBits, int kAt, int kTop>
void CodesWithTopBit(const uint8_t* block, int run, uint8_t* to) {
  for (int i = 0; i < 32; ++i) {
    const int low = InTurn<kLowBits>(block + kAt, run, i);
    to[i] = static_cast<uint8_t>(low | InTurn<1>(block + kTop, run, i) << kLowBits);
  }
}

// Each half of a block has 64 bytes whose low halves are runs 0 and 1 and whose high halves are
// runs 2 and 3, and 32 bytes with the two upper bits of each.
void RunOfQ6K(const uint8_t* block, int run, uint8_t* to) {
  const int half = run / 4, in_half = run % 4;
  const uint8_t* const low = block + half * 64 + in_half % 2 * 32;
  const uint8_t* const high = block + 128 + half * 32;
  for (int i = 0; i < 32; ++i) {
    to[i] = static_cast<uint8_t>((low[i] >> (in_half / 2 * 4) & 15) | (high[i] >> (2 * in_half) & 3)
                                                                          << 4);
  }
}

// Codes 0 to 2, up to five to a byte: those of a byte are the digits of byte / 256 to the base 3
// behind the point. 32 bytes have a code each of five runs; behind them 16 bytes have the next 16
// codes, the next but one and so on, and last four bytes have four times four.
void RunOfTq1(const uint8_t* block, int run, uint8_t* to) {
  constexpr uint8_t kPowers[] = {1, 3, 9, 27, 81};
  for (int i = 0; i < 32; ++i) {
    const int code = run * 32 + i;
    const int first = code < 160 ? 0 : code < 240 ? 160 : 240;
    const int bytes = code < 160 ? 32 : code < 240 ? 16 : 4;
    const int digits = block[first / 5 + (code - first) % bytes];
    const auto rest = static_cast<uint8_t>(digits * kPowers[(code - first) / bytes]);
    to[i] = static_cast<uint8_t>(rest * 3 >> 8);
  }
}

// One after the other behind d.
template <int kBits>
void RunInOrder(const uint8_t* block, int run, uint8_t* to) {
  UnpackStream(block + 2 + 4 * kBits * run, 32, kBits, to);
}

// Code 8 is a negative zero in E2M1, and zero here.
void MakeZerosPositive(uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = codes[i] == 8 ? 0 : codes[i];
}

void RunOfMxfp4(const uint8_t* block, int /*run*/, uint8_t* to) {
  Nibbles(block + 1, to);
  MakeZerosPositive(to);
}

// 16 codes in eight bytes: eight in the low halves, then eight in the high ones.
void RunOfNvfp4(const uint8_t* block, int run, uint8_t* to) {
  for (int i = 0; i < 32; ++i) {
    to[i] = block[4 + 16 * run + i / 16 * 8 + i % 8] >> (i % 16 / 8 * 4) & 15;
  }
  MakeZerosPositive(to);
}

// --- Scales and zeros ---

template <int kAt>
bool OneScale(const uint8_t* block, uint8_t* scales, uint8_t* /*zeros*/) {
  const uint16_t d = Half(block + kAt);
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

// FP32 numbers: the FP16 number at `half` times the integer of each group.
template <typename Integer>
bool Multiples(const uint8_t* half, int groups, Integer integer, uint8_t* to) {
  const uint16_t d = Half(half);
  for (int group = 0; group < groups; ++group) {
    Store(to, group, HalfToFloat(d) * static_cast<float>(integer(group)));
  }
  return IsFinite(d);
}

bool ScalesAndMinimaOfK(const uint8_t* block, uint8_t* scales, uint8_t* zeros) {
  const auto scale = [&](int group) { return SixBits(block + 4, group, false); };
  const auto minimum = [&](int group) { return SixBits(block + 4, group, true); };
  return Multiples(block, 8, scale, scales) && Multiples(block + 2, 8, minimum, zeros);
}

bool ScalesAndMinimaOfQ2K(const uint8_t* block, uint8_t* scales, uint8_t* zeros) {
  const auto scale = [&](int group) { return block[group] & 15; };
  const auto minimum = [&](int group) { return block[group] >> 4; };
  return Multiples(block + 80, 16, scale, scales) && Multiples(block + 82, 16, minimum, zeros);
}

// Four bits in the halves of eight bytes in turn, two more in the quarters of four bytes.
bool ScalesOfQ3K(const uint8_t* block, uint8_t* scales, uint8_t* /*zeros*/) {
  const auto integer = [from = block + 96](int group) {
    const int low = from[group % 8] >> (group / 8 * 4) & 15;
    return (low | (from[8 + group % 4] >> (group / 4 * 2) & 3) << 4) - 32;
  };
  return Multiples(block + 108, 16, integer, scales);
}

bool ScalesOfQ6K(const uint8_t* block, uint8_t* scales, uint8_t* /*zeros*/) {
  const auto integer = [&](int group) { return static_cast<int8_t>(block[192 + group]); };
  return Multiples(block + 208, 16, integer, scales);
}

// Four bits one after the other behind two bytes with two more of each.
bool ScalesOfIq4Xs(const uint8_t* block, uint8_t* scales, uint8_t* /*zeros*/) {
  const auto integer = [&](int group) {
    const int low = block[4 + group / 2] >> (group % 2 * 4) & 15;
    return (low | (Half(block + 2) >> (2 * group) & 3) << 4) - 32;
  };
  return Multiples(block, 8, integer, scales);
}

// Codes 0 and 1 are -d and d: (code - 1/2) * 2d.
bool SignsOfOneScale(const uint8_t* block, uint8_t* scales, uint8_t* zeros) {
  constexpr uint16_t kOneHalf = 0x3800;
  const uint16_t d = Half(block);
  Store(scales, 0, 2 * HalfToFloat(d));
  Store(zeros, kOneHalf);
  return IsFinite(d);
}

bool Exponent(const uint8_t* block, uint8_t* scales, uint8_t* /*zeros*/) {
  scales[0] = block[0];
  return block[0] != 0xff;
}

// E4M3, whose sign bit has no effect. Of the two NaNs 0x7f stands for zero.
bool ScalesOfNvfp4(const uint8_t* block, uint8_t* scales, uint8_t* /*zeros*/) {
  bool good = true;
  for (int group = 0; group < 4; ++group) {
    scales[group] = block[group] == 0x7f ? 0 : block[group] & 0x7f;
    good &= block[group] != 0xff;
  }
  return good;
}

// Stays in the block.
template <VectorCode kCode>
bool ScaleInBlock(const uint8_t* block, uint8_t* /*scales*/, uint8_t* /*zeros*/) {
  return IsFinite(InfoOf(kCode).scale(block));
}

// --- The table ---

constexpr float kIq4Values[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};

constexpr GgufBlock Constant(absl::string_view name, int64_t bytes, int bits) {
  return {
      .name = name, .bytes = bytes, .bits = bits, .zero = 1 << (bits - 1), .cells = OneScale<0>};
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

// One scale, at kAt, for a block of codes 0 to 2, whose place holds 3 too.
template <int kAt = 0>
constexpr GgufBlock Ternary(absl::string_view name, int64_t codes, int64_t bytes) {
  return {.name = name,
          .codes = codes,
          .bytes = bytes,
          .group = codes,
          .bits = 2,
          .zero = 1,
          .cells = OneScale<kAt>};
}

template <VectorCode kCode>
constexpr GgufBlock Vector(absl::string_view name, int64_t bytes) {
  return {.name = name,
          .codes = kVectorBlock,
          .bytes = bytes,
          .group = kVectorBlock,
          .code = CodeKind::kVector,
          .vector = kCode,
          .cells = ScaleInBlock<kCode>};
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
    {.name = "Q2_K",
     .codes = 256,
     .bytes = 84,
     .group = 16,
     .bits = 2,
     .zero_kind = ZeroKind::kRealAfter,
     .zero_dtype = DType::kFp32,
     .scale_dtype = DType::kFp32,
     .run = CodesInTurn<2, 16>,
     .cells = ScalesAndMinimaOfQ2K},
    {.name = "Q3_K",
     .codes = 256,
     .bytes = 110,
     .group = 16,
     .bits = 3,
     .zero = 4,
     .scale_dtype = DType::kFp32,
     .run = CodesWithTopBit<2, 32, 0>,
     .cells = ScalesOfQ3K},
    With(SuperBlock("Q4_K", 144, 4), CodesInTurn<4, 16>),
    With(SuperBlock("Q5_K", 176, 5), CodesWithTopBit<4, 48, 16>),
    {.name = "Q6_K",
     .codes = 256,
     .bytes = 210,
     .group = 16,
     .bits = 6,
     .zero = 32,
     .scale_dtype = DType::kFp32,
     .run = RunOfQ6K,
     .cells = ScalesOfQ6K},
    {.name = "IQ4_NL",
     .bytes = 18,
     .code = CodeKind::kTable,
     .table = kIq4Values,
     .run = NibblesAt<2>,
     .cells = OneScale<0>},
    {.name = "IQ4_XS",
     .codes = 256,
     .bytes = 136,
     .code = CodeKind::kTable,
     .table = kIq4Values,
     .scale_dtype = DType::kFp32,
     .run = NibblesAt<8>,
     .cells = ScalesOfIq4Xs},
    With(Ternary<52>("TQ1_0", 256, 54), RunOfTq1),
    With(Ternary<64>("TQ2_0", 256, 66), CodesInTurn<2, 0>),
    {.name = "MXFP4",
     .bytes = 17,
     .code = CodeKind::kE2m1,
     .scale_dtype = DType::kE8m0,
     .run = RunOfMxfp4,
     .cells = Exponent},
    {.name = "NVFP4",
     .codes = 64,
     .bytes = 36,
     .group = 16,
     .code = CodeKind::kE2m1,
     .scale_dtype = DType::kE4m3,
     .run = RunOfNvfp4,
     .cells = ScalesOfNvfp4},
    {.name = "Q1_0",
     .codes = 128,
     .bytes = 18,
     .group = 128,
     .bits = 1,
     .zero_kind = ZeroKind::kRealBefore,
     .scale_dtype = DType::kFp32,
     .run = RunInOrder<1>,
     .cells = SignsOfOneScale},
    With(Ternary("Q2_0", 64, 18), RunInOrder<2>),
    With(Ternary("Q2_0_G128", 128, 34), RunInOrder<2>),
    Vector<VectorCode::kIq2Xxs>("IQ2_XXS", 66),
    Vector<VectorCode::kIq2Xs>("IQ2_XS", 74),
    Vector<VectorCode::kIq2S>("IQ2_S", 82),
    Vector<VectorCode::kIq3Xxs>("IQ3_XXS", 98),
    Vector<VectorCode::kIq3S>("IQ3_S", 110),
    Vector<VectorCode::kIq1S>("IQ1_S", 50),
    Vector<VectorCode::kIq1M>("IQ1_M", 56),
};

}  // namespace

absl::Span<const GgufBlock> GgufBlocks() { return kBlocks; }

}  // namespace awqd
