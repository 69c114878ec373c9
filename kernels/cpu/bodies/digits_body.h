// The product of 16-bit activations as integers: x is rounded to two digits of 8 bits, by blocks of
// 128 rows with a power of two for each, and multiplied by codes of 4 or 8 bits as they are stored,
// four to a lane, by the instruction that adds up four products of bytes.
//
//   x[k] ~ step * (256 * high + low)                            of the block and the token
//   y[n] = sum over blocks of (scale * step) * sum(q * code) - offset * sum(x)
//
// where q is both digits together and offset the zero times the scale, or a zero after it. Sums of
// a block are exact in INT32 (8 * 255 * 2^15 a lane); 16 lanes of FP32 hold what blocks add, and
// are folded at the end. Every (token, column) is one such chain, so a row's bits do not depend on
// its batch.
//
// What becomes of x: block_integers.h. Included by the body file for AVX-512 VNNI; everything has
// internal linkage.
#pragma once

#include "kernels/cpu/bodies/block_integers.h"

namespace awqd::cpu {
namespace {

// Blocks that share a group.
inline int64_t BlocksOfGroup(const K16Weight& w) {
  return w.groups == 1 ? w.blocks : w.runs_per_group / 8;
}

// --- Making digits ---

// Rows 16 i .. 16 i + 15 of a block in q[i], to the order of codes. Of 4 bits byte b of lane i
// holds rows 32 b + i and 32 b + 16 + i; of 8 bits rows follow each other.
inline void StoreDigit(const __m512i (&q)[8], int bits, int8_t* out) {
  if (bits == 8) {
    for (int i = 0; i < 8; ++i) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * i), _mm512_cvtepi32_epi8(q[i]));
    }
    return;
  }
  const __m512i byte = _mm512_set1_epi32(0xff);
  for (int half = 0; half < 2; ++half) {
    __m512i lanes = _mm512_and_si512(q[half], byte);
    lanes = _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_and_si512(q[2 + half], byte), 8));
    lanes = _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_and_si512(q[4 + half], byte), 16));
    lanes = _mm512_or_si512(lanes, _mm512_slli_epi32(q[6 + half], 24));
    _mm512_storeu_si512(out + 64 * half, lanes);
  }
}

// One token, of FP16 or BF16. False where it is not taken.
bool MakeDigits(const K16Weight& w, const void* x, Element type, const TokenIntegers& out) {
  const int64_t blocks = BlocksOfGroup(w);
  std::memset(out.sums, 0, w.groups * sizeof(float));
  BlockIntegers integers;
  for (int64_t block = 0; block < w.blocks; ++block) {
    if (!integers.Make(w, x, type, block * kIntegerRows)) return false;
    int8_t* const digits = static_cast<int8_t*>(out.values) + block * kDigitBytes;
    __m512i high[8];
    for (int i = 0; i < 8; ++i) {
      high[i] = _mm512_srai_epi32(_mm512_add_epi32(integers.q[i], _mm512_set1_epi32(128)), 8);
    }
    StoreDigit(high, w.bits, digits);
    // What is left modulo 256 is the lower digit.
    StoreDigit(integers.q, w.bits, digits + kIntegerRows);
    out.steps[block] = integers.step;
    out.sums[block / blocks] += integers.Sum(0, 8);
  }
  return true;
}

// --- Multiplying ---

// act(0), act(1), ..., with numbers that the compiler knows: where they index arrays of vectors,
// these stay in registers.
template <int kCount, int kFrom = 0, typename Act>
AWQD_ALWAYS_INLINE inline void Times(Act act) {
  if constexpr (kFrom < kCount) {
    act(Number<kFrom>());
    Times<kCount, kFrom + 1>(act);
  }
}

// 64 codes of a column as bytes: of 4 bits half of what 64 bytes hold.
struct CodesOfBlock {
  __m512i first, second;

  template <int kBits>
  static AWQD_ALWAYS_INLINE CodesOfBlock Load(const uint8_t* block) {
    const __m512i bytes = _mm512_loadu_si512(block);
    if constexpr (kBits == 8) {
      const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
      return {_mm512_xor_si512(bytes, sign),
              _mm512_xor_si512(_mm512_loadu_si512(block + 64), sign)};
    } else {
      const __m512i mask = _mm512_set1_epi8(15);
      return {_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask)};
    }
  }
};

// Both digits of a token's block, the halves of each as codes have them.
AWQD_ALWAYS_INLINE inline void LoadDigits(const int8_t* block, __m512i (&out)[4]) {
  for (int i = 0; i < 4; ++i) out[i] = _mm512_loadu_si512(block + 64 * i);
}

// 16 lanes of sum(q * code) of a block.
AWQD_ALWAYS_INLINE inline __m512 SumOfBlock(const __m512i (&digits)[4], const CodesOfBlock& codes) {
  __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes.first, digits[0]);
  sum = _mm512_dpbusd_epi32(sum, codes.second, digits[1]);
  sum = _mm512_slli_epi32(sum, 8);
  sum = _mm512_dpbusd_epi32(sum, codes.first, digits[2]);
  sum = _mm512_dpbusd_epi32(sum, codes.second, digits[3]);
  return _mm512_cvtepi32_ps(sum);
}

// Of one tile: the scales of its groups, and the offsets times the sums of x.
struct TileFactors {
  float* scales;  // [groups][8], and four more

  // Writes scales, and in offsets[t][8] the sum over groups of offset * sum(x).
  void Make(const K16Weight& w, int64_t tile, const DigitTask& task, float* offsets) const {
    std::memset(offsets, 0, task.rows * 8 * sizeof(float));
    for (int64_t group = 0; group < w.groups; ++group) {
      float zeros[8];
      PrefetchCells(w, tile, group);
      LoadCells(w, tile, group, scales + group * 8, zeros);
      __m256 offset = _mm256_loadu_ps(zeros);
      if (!w.zero_after) offset = _mm256_mul_ps(offset, _mm256_loadu_ps(scales + group * 8));
      for (int64_t t = 0; t < task.rows; ++t) {
        const __m256 sum = _mm256_set1_ps(task.sums[t * w.groups + group]);
        const __m256 old = _mm256_loadu_ps(offsets + t * 8);
        _mm256_storeu_ps(offsets + t * 8, _mm256_fmadd_ps(offset, sum, old));
      }
    }
  }
};

// Columns [first, first + kColumns) of a tile for kTokens tokens, whose sums go to out[t * 8 + c].
template <int kBits, int kTokens, int kColumns>
__attribute__((noinline)) void DigitTile(const K16Weight& w, const DigitTask& task, int64_t tile,
                                         int first, int64_t token, const float* scales,
                                         float* out) {
  constexpr int64_t kColumnBytes = kBits * 16;
  const int64_t tile_bytes = 8 * kColumnBytes;
  const int64_t per_group = BlocksOfGroup(w);
  const uint8_t* codes = w.codes + tile * w.blocks * tile_bytes + first * kColumnBytes;
  const int8_t* digits = task.digits + token * w.blocks * kDigitBytes;
  const float* steps = task.steps + token * w.blocks;
  // Whole tiles are read once, in order; halves read the tile that comes next.
  const int64_t ahead = (kColumns == 8 ? 16 : w.blocks) * tile_bytes;
  Vec::F acc[kTokens][kColumns];
  Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
    Times<kColumns>([&](auto c) AWQD_ALWAYS_INLINE { acc[t][c] = Vec::Zero(); });
  });
  int64_t left = per_group;
  const float* of_group = scales + first;
  for (int64_t block = 0; block < w.blocks; ++block, codes += tile_bytes, digits += kDigitBytes) {
    for (int64_t line = 0; line < kColumns * kColumnBytes; line += 64) {
      __builtin_prefetch(codes + ahead + line, kRead, kL2Cache);
    }
    alignas(32) float factors[kTokens][8];
    for (int t = 0; t < kTokens; ++t) {
      // Of a half of the tile the upper four are not used.
      const __m256 step = _mm256_set1_ps(steps[t * w.blocks + block]);
      _mm256_store_ps(factors[t], _mm256_mul_ps(step, _mm256_loadu_ps(of_group)));
    }
    asm("" : "+m"(factors));
    const auto add = [&](int t, int c, const __m512i(&x)[4],
                         const CodesOfBlock& column) AWQD_ALWAYS_INLINE {
      acc[t][c] = Vec::Fma(SumOfBlock(x, column), Vec::Set(factors[t][c]), acc[t][c]);
    };
    if constexpr (kColumns == 8) {
      __m512i x[kTokens][4];
      Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
        LoadDigits(digits + t * w.blocks * kDigitBytes, x[t]);
      });
      Times<kColumns>([&](auto c) AWQD_ALWAYS_INLINE {
        const auto column = CodesOfBlock::Load<kBits>(codes + c * kColumnBytes);
        Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE { add(t, c, x[t], column); });
      });
    } else {
      CodesOfBlock columns[kColumns];
      Times<kColumns>([&](auto c) AWQD_ALWAYS_INLINE {
        columns[c] = CodesOfBlock::Load<kBits>(codes + c * kColumnBytes);
      });
      Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
        __m512i x[4];
        LoadDigits(digits + t * w.blocks * kDigitBytes, x);
        Times<kColumns>([&](auto c) AWQD_ALWAYS_INLINE { add(t, c, x, columns[c]); });
      });
    }
    if (--left == 0) left = per_group, of_group += 8;
  }
  // A copy, because what has an address is kept in memory.
  Vec::F sums[kTokens * kColumns];
  Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
    Times<kColumns>([&](auto c) AWQD_ALWAYS_INLINE { sums[t * kColumns + c] = acc[t][c]; });
  });
  alignas(64) float folded[(kTokens * kColumns + 15) / 16 * 16];
  Vec::Sums<kTokens * kColumns>(sums, folded);
  for (int t = 0; t < kTokens; ++t) {
    for (int c = 0; c < kColumns; ++c) out[t * 8 + first + c] = folded[t * kColumns + c];
  }
}

// y = ((sums - offsets) * outer * x_scale) + bias of one tile, for a DigitTask or a QuadTask; of
// sums and offsets [rows][8]. `x_scale`: [rows], or null for 1.
template <typename Task>
void StoreTile(const K16Weight& w, const Task& task, int64_t tile, const float* x_scale,
               const float* sums, const float* offsets) {
  float outer[8], values[8];
  LoadOuter(w, tile, outer);
  const float* bias = task.bias != nullptr ? task.bias + tile * 8 : nullptr;
  const int64_t columns = w.n - tile * 8;
  for (int64_t t = 0; t < task.rows; ++t) {
    const float scale = x_scale == nullptr ? 1 : x_scale[t];
    for (int c = 0; c < 8; ++c) {
      values[c] = (sums[t * 8 + c] - offsets[t * 8 + c]) * outer[c] * scale;
    }
    const int64_t index = t * task.y_stride + tile * 8;
    if (columns >= 8) {
      Store8Plus(task.y, task.y_type, index, values, bias);
      continue;
    }
    for (int64_t c = 0; c < columns; ++c) {
      Store1(task.y, task.y_type, index + c, bias != nullptr ? values[c] + bias[c] : values[c]);
    }
  }
}

constexpr int kDigitTokens = 4;  // that are multiplied together

template <int kBits>
void DigitProductOf(const K16Weight& w, const DigitTask& task) {
  const TileFactors factors = {task.scratch};
  float* const offsets = task.scratch + w.groups * 8 + 8;
  float* const sums = offsets + task.rows * 8;
  const int64_t parts = (task.rows + kDigitTokens - 1) / kDigitTokens;
  for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
    factors.Make(w, tile, task, offsets);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = task.rows * part / parts;
      const int64_t count = task.rows * (part + 1) / parts - begin;
      WithCount<1, kDigitTokens>(count, [&](auto n) {
        constexpr int kTokens = decltype(n)::kValue, kColumns = kTokens <= 2 ? 8 : 4;
        for (int first = 0; first < 8; first += kColumns) {
          DigitTile<kBits, kTokens, kColumns>(w, task, tile, first, begin, factors.scales,
                                              sums + begin * 8);
        }
      });
    }
    StoreTile(w, task, tile, nullptr, sums, offsets);
  }
}

void DigitProduct(const K16Weight& w, const DigitTask& task) {
  if (w.bits == 8) return DigitProductOf<8>(w, task);
  DigitProductOf<4>(w, task);
}

}  // namespace
}  // namespace awqd::cpu
