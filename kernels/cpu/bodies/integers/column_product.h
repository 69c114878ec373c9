// The product of 16-bit activations as integers: x is rounded to two digits of 8 bits, by blocks of
// 128 rows with a power of two for each, and multiplied by codes of 4 or 8 bits as they are stored,
// as bytes, whose products are added up in lanes of 32 bits.
//
//   x[k] ~ step * (256 * high + low)                            of the block and the token
//   y[n] = sum over blocks of scale * (step * sum(q * (code - zero)))
//
// where q is both digits together. Lanes are folded where a block ends: its sum is an exact INT32
// (128 * 255 * 32512 < 2^31), integer zeros are taken off by the sum of q, real ones as in
// panel_product.h. Blocks are added in FP32, in their order. So a token's bits do not depend on its
// batch, and are those of pairs_body.h.
//
// What becomes of x: int16_block.h. Included by body files behind their ByteLanes;
// everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/int16_block.h"
#include "kernels/cpu/bodies/integers/panel_product.h"

namespace awqd::cpu {
namespace {

// Blocks that share a group.
inline int64_t BlocksOfGroup(const K16Weight& w) {
  return w.groups == 1 ? w.blocks : w.runs_per_group / 8;
}

// --- Making digits ---

// The lower bytes of a block's q, to the order of codes. Of 4 bits byte b of lane i holds rows
// 32 b + i and 32 b + 16 + i; of 8 bits rows follow each other.
inline void StoreDigit(const Pairs (&q)[8], int bits, int8_t* out) {
  if (bits == 8) {
    for (int i = 0; i < 8; ++i) q[i].StoreBytes(out + 16 * i);
    return;
  }
  const Pairs byte = Pairs::Set(0xff);
  for (int half = 0; half < 2; ++half) {
    const Pairs lanes = (q[half] & byte) | (q[2 + half] & byte) << 8 | (q[4 + half] & byte) << 16 |
                        q[6 + half] << 24;
    lanes.Store(out + 64 * half);
  }
}

// One token, of FP16 or BF16. False where it is not taken.
bool MakeDigits(const K16Weight& w, const void* x, Element type, const TokenIntegers& out) {
  BlockIntegers integers;
  for (int64_t block = 0; block < w.blocks; ++block) {
    if (!integers.Make(w, x, type, block * kIntegerRows)) return false;
    int8_t* const digits = static_cast<int8_t*>(out.values) + block * kIntegerBytes;
    out.steps[block] = integers.step;
    out.sums[block] = integers.Sum();
    if (w.bits == 8 && !ByteLanes::kDigitsOf8Bits) {
      integers.Store16(digits);
      continue;
    }
    Pairs high[8];
    for (int i = 0; i < 8; ++i) high[i] = integers.q[i].Plus(Pairs::Set(128)) >> 8;
    StoreDigit(high, w.bits, digits);
    // What is left modulo 256 is the lower digit.
    StoreDigit(integers.q, w.bits, digits + kIntegerRows);
  }
  return true;
}

// --- Multiplying ---

// Of one tile: what its groups need.
struct TileFactors {
  float* scales;   // [groups][8]
  float* offsets;  // [groups][8]: real zeros, negated
  int32_t* zeros;  // [groups][8]: integer zeros

  TileFactors(const K16Weight& w, float* memory)
      : scales(memory),
        offsets(memory + w.groups * 8),
        zeros(reinterpret_cast<int32_t*>(memory + 2 * w.groups * 8)) {}

  void Make(const K16Weight& w, int64_t tile) const {
    for (int64_t group = 0; group < w.groups; ++group) {
      float zero[8];
      PrefetchCells(w, tile, group);
      LoadCells(w, tile, group, scales + group * 8, zero);
      const Eight::F values = Eight::Load(zero);
      Eight::Store(offsets + group * 8, Eight::Sub(Eight::Set(0), values));
      if (HasIntegerZeros(w)) Eight::StoreInts(zeros + group * 8, Eight::Rounded(values));
    }
  }
};

// The sums of 8 columns, less their integer zeros times the sum of q.
inline Eight::I FoldColumns(const K16Weight& w, const ByteLanes::Sums (&v)[8], Eight::I zeros,
                            int32_t q_sum) {
  const Eight::I sum = Eight::Plus(ByteLanes::Fold(v), ByteLanes::TakenOff(w.bits) * q_sum);
  return HasIntegerZeros(w) ? Eight::SubTimes(sum, zeros, q_sum) : sum;
}

// What comes 16 blocks later, of this tile or the next.
template <int64_t kBytes>
AWQD_ALWAYS_INLINE inline void PrefetchBlocks(const uint8_t* codes) {
  for (int64_t line = 0; line < kBytes; line += 64) {
    __builtin_prefetch(codes + 16 * kBytes + line, kRead, kL2Cache);
  }
}

// What panel_product.h's AddGroup does, of 8 columns in registers.
inline Eight::F AddGroupOf8(const K16Weight& w, Eight::F value, float x_sum, Eight::F scale,
                            Eight::F offset, Eight::F sum) {
  const Eight::F x = Eight::Set(x_sum);
  if (HasIntegerZeros(w)) return Eight::Fma(value, scale, sum);
  if (w.zero_after) return Eight::Fma(offset, x, Eight::Fma(value, scale, sum));
  return Eight::Fma(Eight::Fma(offset, x, value), scale, sum);
}

// sums[t][c] = lanes of sum(q * code) of a block, both digits.
template <int kBits, int kTokens>
AWQD_ALWAYS_INLINE inline void MultiplyDigits(const int8_t* digits, int64_t stride,
                                              const uint8_t* codes,
                                              ByteLanes::Sums (&sums)[kTokens][8]) {
  Times<8>([&](auto c) AWQD_ALWAYS_INLINE {
    const auto column = ByteLanes::ColumnOfDigits<kBits>::Load(codes + c * kBits * 16);
    Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
      sums[t][c] = ByteLanes::BothDigits(column, digits + t * stride);
    });
  });
}

// A tile for kTokens tokens, whose sums go to out[t * 8 + c].
template <int kBits, int kTokens>
__attribute__((noinline)) void DigitTile(const K16Weight& w, const StandInTask& task, int64_t tile,
                                         int64_t token, const TileFactors& factors, float* out) {
  constexpr int64_t kTileBytes = 8 * kBits * 16;
  const int64_t stride = w.blocks * kIntegerBytes;
  const uint8_t* codes = w.codes + tile * w.blocks * kTileBytes;
  const int8_t* digits = static_cast<const int8_t*>(task.values) + token * stride;
  Eight::F acc[kTokens];
  Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE { acc[t] = Eight::Set(0); });
  for (int64_t group = 0, block = 0; group < w.groups; ++group) {
    const int64_t border = block + BlocksOfGroup(w), end = border < w.blocks ? border : w.blocks;
    const Eight::F scale = Eight::Load(factors.scales + group * 8);
    const Eight::F offset = Eight::Load(factors.offsets + group * 8);
    const Eight::I zero = Eight::LoadInts(factors.zeros + group * 8);
    for (; block < end; ++block, codes += kTileBytes, digits += kIntegerBytes) {
      PrefetchBlocks<kTileBytes>(codes);
      ByteLanes::Sums sums[kTokens][8];
      MultiplyDigits<kBits, kTokens>(digits, stride, codes, sums);
      Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
        const int64_t at = (token + t) * w.blocks + block;
        const float step = task.steps[at], x_sum = step * static_cast<float>(task.sums[at]);
        const Eight::I sum = FoldColumns(w, sums[t], zero, task.sums[at]);
        const Eight::F value = Eight::Mul(Eight::ToFloat(sum), Eight::Set(step));
        acc[t] = AddGroupOf8(w, value, x_sum, scale, offset, acc[t]);
      });
    }
  }
  Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE { Eight::Store(out + t * 8, acc[t]); });
}

// multiply(first, count) for the tokens in equal parts of at most kMost, with counts that the
// compiler knows.
template <int kMost, typename Multiply>
void ForParts(int64_t rows, Multiply multiply) {
  const int64_t parts = (rows + kMost - 1) / kMost;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = rows * part / parts;
    WithCount<1, kMost>(rows * (part + 1) / parts - begin, [&](auto n) { multiply(begin, n); });
  }
}

template <int kBits>
void DigitProductOf(const K16Weight& w, const StandInTask& task) {
  auto* const scratch = static_cast<float*>(task.scratch);
  const TileFactors factors(w, scratch);
  float* const sums = scratch + 3 * w.groups * 8;
  for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
    factors.Make(w, tile);
    ForParts<ByteLanes::kTokens>(task.rows, [&](int64_t begin, auto n) {
      DigitTile<kBits, n.kValue>(w, task, tile, begin, factors, sums + begin * 8);
    });
    StoreTile(w, task, tile, nullptr, sums, 8);
  }
}

// One body file wants its parts alone.
[[maybe_unused]] void DigitProduct(const K16Weight& w, const StandInTask& task) {
  if (w.bits == 8) return DigitProductOf<8>(w, task);
  DigitProductOf<4>(w, task);
}

}  // namespace
}  // namespace awqd::cpu
