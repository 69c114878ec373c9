// The product of INT8 activations, exact in INT32. A tile of 8 columns is decoded once, to 16-bit
// integers less their zeros; then its columns are multiplied by the tokens, some of each at a time,
// by the instruction that multiplies pairs of 16 bits and adds the two products.
//
// Included by each body file once, behind its flags and its Vec; everything here is in an unnamed
// namespace.
#include <cstdint>
#include <cstring>

#include "kernels/cpu/bodies/bodies.h"

namespace awqd::cpu {
namespace {

constexpr int kRun = 16;         // rows that share a group
constexpr int kRunsOfBlock = 8;  // that lie together, of one column
constexpr int kIntegerBlock = kRun * kRunsOfBlock;
constexpr int kIntegerColumns = 8;  // of a tile

#if defined(__AVX2__)
struct IntegerStores {
  // 16 times byte - zero, of bytes stored as if signed.
  static void StoreBytes(const uint8_t* bytes, int16_t zero, int16_t* out) {
    Subtract(_mm256_cvtepu8_epi16(FlipSigns(Load16(bytes))), zero, out);
  }
  static void Subtract(__m256i codes, int16_t zero, int16_t* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_sub_epi16(codes, _mm256_set1_epi16(zero)));
  }
};
#endif

// 16-bit integers of one instruction set: how they are made of codes, and a vector of sums of their
// products, modulo 2^32.
#if defined(__AVX512BW__)
struct Int16Vec : IntegerStores {
  static constexpr int kElements = 32;
  __m512i v = _mm512_setzero_si512();
  static __m512i Load(const int16_t* p) { return _mm512_loadu_si512(p); }
  void Add(__m512i a, __m512i b) { v = AddMultiplied(v, a, b); }
  int32_t Total() const { return _mm512_reduce_add_epi32(v); }

  using Lanes = __m512i;
  static Lanes LoadLanes(const uint32_t* lanes) { return _mm512_loadu_si512(lanes); }
  // 16 times (lane >> shift & mask) - zero.
  static void StoreRun(Lanes lanes, int shift, uint32_t mask, int16_t zero, int16_t* out) {
    const __m512i codes =
        _mm512_and_si512(_mm512_srli_epi32(lanes, shift), _mm512_set1_epi32(mask));
    Subtract(_mm512_cvtepi32_epi16(codes), zero, out);
  }
};
#elif defined(__AVX2__)
struct Int16Vec : IntegerStores {
  static constexpr int kElements = 16;
  __m256i v = _mm256_setzero_si256();
  static __m256i Load(const int16_t* p) { return Load32(p); }
  void Add(__m256i a, __m256i b) { v = _mm256_add_epi32(v, _mm256_madd_epi16(a, b)); }
  int32_t Total() const {
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), v);
    int32_t sum = 0;
    for (int32_t lane : lanes) sum += lane;
    return sum;
  }

  struct Lanes {
    __m256i low, high;
  };
  static Lanes LoadLanes(const uint32_t* lanes) { return {Load32(lanes), Load32(lanes + 8)}; }
  // 16 times (lane >> shift & mask) - zero.
  static void StoreRun(const Lanes& lanes, int shift, uint32_t mask, int16_t zero, int16_t* out) {
    const __m256i m = _mm256_set1_epi32(static_cast<int>(mask));
    const __m256i low = _mm256_and_si256(_mm256_srli_epi32(lanes.low, shift), m);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi32(lanes.high, shift), m);
    Subtract(_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8), zero, out);
  }
};
#elif defined(AWQD_NEON_BODY)
struct Int16Vec {
  static constexpr int kElements = 8;
  int32x4_t v = vdupq_n_s32(0);
  static int16x8_t Load(const int16_t* p) { return vld1q_s16(p); }
  void Add(int16x8_t a, int16x8_t b) {
    v = vmlal_s16(v, vget_low_s16(a), vget_low_s16(b));
    v = vmlal_high_s16(v, a, b);
  }
  int32_t Total() const { return vaddvq_s32(v); }

  using Lanes = const uint32_t*;
  static Lanes LoadLanes(const uint32_t* lanes) { return lanes; }
  // 16 times (lane >> shift & mask) - zero.
  static void StoreRun(Lanes lanes, int shift, uint32_t mask, int16_t zero, int16_t* out) {
    for (int i = 0; i < kRun; i += 8) {
      const auto codes = [&](int at) {
        const uint32x4_t moved = vshlq_u32(vld1q_u32(lanes + at), vdupq_n_s32(-shift));
        return vreinterpretq_u16_u32(vandq_u32(moved, vdupq_n_u32(mask)));
      };
      Subtract(vuzp1q_u16(codes(i), codes(i + 4)), zero, out + i);
    }
  }
  // 16 times byte - zero, of bytes stored as if signed.
  static void StoreBytes(const uint8_t* bytes, int16_t zero, int16_t* out) {
    const uint8x16_t codes = FlipSigns(vld1q_u8(bytes));
    Subtract(vmovl_u8(vget_low_u8(codes)), zero, out);
    Subtract(vmovl_high_u8(codes), zero, out + 8);
  }
  static void Subtract(uint16x8_t codes, int16_t zero, int16_t* out) {
    vst1q_s16(out, vsubq_s16(vreinterpretq_s16_u16(codes), vdupq_n_s16(zero)));
  }
};
#else
struct Int16Vec {
  static constexpr int kElements = 8;
  int32_t v[kElements] = {};
  static const int16_t* Load(const int16_t* p) { return p; }
  void Add(const int16_t* a, const int16_t* b) {
    for (int i = 0; i < kElements; ++i) v[i] += static_cast<int32_t>(a[i]) * b[i];
  }
  int32_t Total() const {
    int32_t sum = 0;
    for (int32_t lane : v) sum += lane;
    return sum;
  }

  using Lanes = const uint32_t*;
  static Lanes LoadLanes(const uint32_t* lanes) { return lanes; }
  // 16 times (lane >> shift & mask) - zero.
  static void StoreRun(Lanes lanes, int shift, uint32_t mask, int16_t zero, int16_t* out) {
    for (int i = 0; i < kRun; ++i) {
      out[i] = static_cast<int16_t>(static_cast<int>(lanes[i] >> shift & mask) - zero);
    }
  }
  // 16 times byte - zero, of bytes stored as if signed.
  static void StoreBytes(const uint8_t* bytes, int16_t zero, int16_t* out) {
    for (int i = 0; i < kRun; ++i) out[i] = static_cast<int16_t>((bytes[i] ^ 0x80) - zero);
  }
};
#endif

// A block (kernels/layouts/k16.cc): lane i of run j is out[16 j + i]. `zeros`: of each run.
template <int kBits>
void DecodeIntegers(const uint8_t* block, const int16_t* zeros, int16_t* out) {
  if constexpr (kBits == 8) {
    for (int j = 0; j < kRunsOfBlock; ++j) {
      Int16Vec::StoreBytes(block + kRun * j, zeros[j], out + kRun * j);
    }
  } else {
    uint32_t words[kRun];
    if constexpr (kBits == 4) {
      std::memcpy(words, block, sizeof(words));
    } else {
      Vec::WidenLanes(block, kBits, words);
    }
    const auto lanes = Int16Vec::LoadLanes(words);
#pragma GCC unroll 8
    for (int j = 0; j < kRunsOfBlock; ++j) {
      Int16Vec::StoreRun(lanes, kBits * j, (1u << kBits) - 1, zeros[j], out + kRun * j);
    }
  }
}

// The integers of a column of the tile, blocks * 128 of them.
template <int kBits>
void DecodeColumn(const K16Weight& w, int64_t tile, int column, int16_t* out) {
  const uint8_t* codes = w.codes + (tile * w.blocks * kIntegerColumns + column) * w.block_bytes;
  const uint8_t* stored = w.zeros == nullptr ? nullptr : w.zeros + tile * w.groups * 8 + column;
  int64_t group = 0, left = w.runs_per_group;  // of the group
  for (int64_t block = 0; block < w.blocks; ++block, out += kIntegerBlock) {
    int16_t zeros[kRunsOfBlock];
    for (int16_t& zero : zeros) {
      zero = static_cast<int16_t>(stored == nullptr ? w.zero : stored[group * 8]);
      // Past the last group there is padding, which meets activations of 0.
      if (--left == 0 && group + 1 < w.groups) left = w.runs_per_group, ++group;
    }
    DecodeIntegers<kBits>(codes + block * kIntegerColumns * w.block_bytes, zeros, out);
  }
}

void DecodeTile(const K16Weight& w, int64_t tile, int16_t* out) {
  for (int c = 0; c < kIntegerColumns && tile * kIntegerColumns + c < w.n; ++c) {
    if (w.bits == 8) {
      DecodeColumn<8>(w, tile, c, out);
    } else {
      WithCount<1, 4>(w.bits, [&](auto bits) { DecodeColumn<bits.kValue>(w, tile, c, out); });
    }
    out += w.blocks * kIntegerBlock;
  }
}

// kTokens rows of x by kColumns neighbouring columns.
template <int kTokens, int kColumns>
void MultiplyIntegers(const int16_t* x, int64_t x_stride, const int16_t* columns, int64_t length,
                      int32_t* y, int64_t y_stride) {
  Int16Vec sums[kTokens][kColumns];
  for (int64_t k = 0; k < length; k += Int16Vec::kElements) {
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const auto weights = Int16Vec::Load(columns + c * length + k);
#pragma GCC unroll 8
      for (int m = 0; m < kTokens; ++m) {
        sums[m][c].Add(Int16Vec::Load(x + m * x_stride + k), weights);
      }
    }
  }
  for (int m = 0; m < kTokens; ++m) {
    for (int c = 0; c < kColumns; ++c) y[m * y_stride + c] = sums[m][c].Total();
  }
}

template <int kTokens>
void MultiplyTokens(const K16Weight& w, const IntegerTask& task, int64_t m, int64_t tile) {
  const int64_t length = w.blocks * kIntegerBlock;
  const int16_t* x = task.x + m * task.x_stride;
  int32_t* y = task.y + m * task.y_stride + tile * kIntegerColumns;
  const int64_t left = w.n - tile * kIntegerColumns;
  const int64_t columns = left < kIntegerColumns ? left : kIntegerColumns;
  int64_t c = 0;
  for (; c + 4 <= columns; c += 4) {
    MultiplyIntegers<kTokens, 4>(x, task.x_stride, task.scratch + c * length, length, y + c,
                                 task.y_stride);
  }
  for (; c < columns; ++c) {
    MultiplyIntegers<kTokens, 1>(x, task.x_stride, task.scratch + c * length, length, y + c,
                                 task.y_stride);
  }
}

void IntegerProduct(const K16Weight& w, const IntegerTask& task) {
  constexpr int kTokens = 4;
  for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
    DecodeTile(w, tile, task.scratch);
    int64_t m = 0;
    for (; m + kTokens <= task.rows; m += kTokens) MultiplyTokens<kTokens>(w, task, m, tile);
    for (; m < task.rows; ++m) MultiplyTokens<1>(w, task, m, tile);
  }
}

}  // namespace
}  // namespace awqd::cpu
