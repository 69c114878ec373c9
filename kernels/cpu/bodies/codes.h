// Decoding blocks of layout k16. First the scales and zeros of a group for 8 columns: as floats,
// tables of 16 weights, factors of sums. Then codes: how a block becomes 16 weights at a time, one
// struct for each way. The loops of product_body.h and dequantize_body.h are written once over
// these and over Vec. Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/vec.h"

namespace awqd::cpu {
namespace {

// --- Scales and zeros ---

inline bool HasIntegerZeros(const K16Weight& w) {
  return w.zeros == nullptr || w.zero_type == Element::kByte;
}

// The scales of 8 columns as floats. `cell`: the first one's.
inline void LoadScales(const K16Weight& w, int64_t cell, float* scales) {
  if (w.scale_type != Element::kByte) return Load8To(w.scales, w.scale_type, cell, scales);
  for (int c = 0; c < 8; ++c) {
    scales[c] = w.scales == nullptr ? 1 : w.scale_values[w.scales[cell + c]];
  }
}

inline void LoadZeros(const K16Weight& w, int64_t cell, float* zeros) {
  if (w.zeros == nullptr) {
    for (int c = 0; c < 8; ++c) zeros[c] = w.zero;
  } else if (w.zero_type == Element::kByte) {
    Zeros8(w.zeros + cell, zeros);
  } else {
    Load8To(w.zeros, w.zero_type, cell, zeros);
  }
}

inline void LoadCells(const K16Weight& w, int64_t tile, int64_t group, float* scales,
                      float* zeros) {
  LoadScales(w, (tile * w.groups + group) * 8, scales);
  LoadZeros(w, (tile * w.groups + group) * 8, zeros);
}

// Fetches those of the next tile. Inlined whatever the compiler thinks: GCC drops calls of a
// function that does nothing but prefetch.
__attribute__((always_inline)) inline void PrefetchCells(const K16Weight& w, int64_t tile,
                                                         int64_t group) {
  const int64_t cell = ((tile + 1) * w.groups + group) * 8;
  __builtin_prefetch(w.scales + cell * w.scale_bytes);
  if (w.zeros != nullptr) __builtin_prefetch(w.zeros + cell * w.zero_bytes);
}

// The 16 weights that a code of a group can be, for 8 columns, without the outer scale. Each step
// is one rounding (kernels/exact.h).
inline void ExactTables(const K16Weight& w, const float* scales, const float* zeros,
                        Vec::F* tables) {
  const Vec::F values = Vec::Load(w.values);
  if (w.zero_after) {
    for (int c = 0; c < 8; ++c) {
      tables[c] = Vec::Sub(Vec::Mul(values, Vec::Set(scales[c])), Vec::Set(zeros[c]));
    }
    return;
  }
#pragma GCC unroll 8
  for (int c = 0; c < 8; ++c) {
    tables[c] = Vec::Mul(Vec::Sub(values, Vec::Set(zeros[c])), Vec::Set(scales[c]));
  }
}

// Loads 8 columns, where a weight is code * scales[c] - offsets[c].
inline void LoadAffine(const K16Weight& w, int64_t tile, int64_t group, float* scales,
                       float* offsets) {
  PrefetchCells(w, tile, group);
  LoadCells(w, tile, group, scales, offsets);
  if (!w.zero_after) {
    for (int c = 0; c < 8; ++c) offsets[c] *= scales[c];
  }
  // Otherwise the compiler takes them apart in registers, which costs a shuffle or two each; a load
  // that repeats one float is free.
  asm("" : "+m"(*reinterpret_cast<float(*)[8]>(scales)));
  asm("" : "+m"(*reinterpret_cast<float(*)[8]>(offsets)));
}

// values[bits - 1][z][i]: the code that is the lowest bits of i, less z.
struct Differences {
  float values[4][16][16] = {};
  constexpr Differences() {
    for (int bits = 1; bits <= 4; ++bits) {
      for (int z = 0; z < 16; ++z) {
        for (int i = 0; i < 16; ++i) {
          values[bits - 1][z][i] = static_cast<float>((i & ((1 << bits) - 1)) - z);
        }
      }
    }
  }
};
alignas(64) constexpr Differences kDifferences;

// tables[c] = weights(c) for 8 columns, rounded to FP16 where a product wants that.
template <typename Weights>
__attribute__((always_inline)) inline void StoreTables(const K16Weight& w, const float* scales,
                                                       Vec::F* tables, Weights weights) {
  if (!w.round_to_half) {
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) tables[c] = weights(c);
    return;
  }
  if (!Ordinary(scales)) {
    for (int c = 0; c < 8; ++c) tables[c] = Vec::RoundToHalf(weights(c));
    return;
  }
  // Veltkamp's splitting: to 11 bits, which are all of a normal half; conversions take twice as
  // long. Ties go to even, because a weight has at most 19 bits.
#pragma GCC unroll 8
  for (int c = 0; c < 8; ++c) {
    const Vec::F exact = weights(c), spread = Vec::Mul(exact, Vec::Set(8193));
    tables[c] = Vec::Sub(spread, Vec::Sub(spread, exact));
  }
}

// Codes of up to 4 bits: the low bits of a lane are an index into a table of 16 weights. Tables of
// the groups [first, last] of a tile. Of integers with 16-bit scales they are exact, as those of
// ExactTables. Three loops, because they take a quarter of a product of one token.
[[maybe_unused]] __attribute__((noinline)) void MakeTables(const K16Weight& w, int64_t tile,
                                                           int64_t first, int64_t last,
                                                           Vec::F* tables) {
  int64_t cell = (tile * w.groups + first) * 8;
  float scales[8], offsets[8];
  if (w.zeros == nullptr) {
    const Vec::F values = Vec::Sub(Vec::Load(w.values), Vec::Set(w.zero));
    for (int64_t group = first; group <= last; ++group, tables += 8, cell += 8) {
      PrefetchCells(w, tile, group);
      LoadScales(w, cell, scales);
      StoreTables(w, scales, tables, [&](int c) { return Vec::Mul(values, Vec::Set(scales[c])); });
    }
  } else if (w.code == Code::kInteger && w.zero_type == Element::kByte) {
    const float* differences = kDifferences.values[w.bits - 1][0];
    for (int64_t group = first; group <= last; ++group, tables += 8, cell += 8) {
      PrefetchCells(w, tile, group);
      LoadScales(w, cell, scales);
      const uint8_t* zeros = w.zeros + cell;
      StoreTables(w, scales, tables, [&](int c) {
        return Vec::Mul(Vec::Load(differences + zeros[c] * 16), Vec::Set(scales[c]));
      });
    }
  } else {
    const Vec::F values = Vec::Load(w.values);
    for (int64_t group = first; group <= last; ++group, tables += 8) {
      LoadAffine(w, tile, group, scales, offsets);
      StoreTables(w, scales, tables, [&](int c) {
        return Vec::Fms(values, Vec::Set(scales[c]), Vec::Set(offsets[c]));
      });
    }
  }
}

// The outer scales of 8 columns; 1 without, and past the last column.
inline void LoadOuter(const K16Weight& w, int64_t tile, float* outer) {
  for (int64_t c = 0; c < 8; ++c) {
    outer[c] = w.outer != nullptr && tile * 8 + c < w.n ? w.outer[tile * 8 + c] : 1;
  }
}

// Whether the sums of a tile have a factor, and which.
inline bool SumScales(const K16Weight& w, int64_t tile, float* out) {
  if (!w.scale_sums && w.outer == nullptr) return false;
  LoadOuter(w, tile, out);
  if (!w.scale_sums) return true;
  float scales[8], unused[8];
  LoadCells(w, tile, 0, scales, unused);
  const float left = w.code == Code::kE4m3 ? 256 : 1;
  for (int c = 0; c < 8; ++c) out[c] = scales[c] * left * out[c];
  return true;
}

// --- Codes ---
//
//   Cell                what is made once per group and column
//   kCells              whether it makes any
//   BlockBytes          of a column's block
//   MakeCells           [groups first to last][8 columns] of a tile
//   Block<kColumns>     some columns of a block: Open, then weights by run and column

// Codes of up to 4 bits.
struct Tables {
  using Cell = Vec::F;
  static constexpr bool kCells = true;
  static void MakeCells(const K16Weight& w, int64_t tile, int64_t first, int64_t last,
                        Cell* cells) {
    MakeTables(w, tile, first, last, cells);
  }
};

struct Nibbles : Tables {
  static constexpr int64_t BlockBytes(const K16Weight&) { return 64; }

  template <int kColumns>
  struct Block {
    const uint32_t* at = nullptr;

    explicit Block(const K16Weight&) {}
    void Open(const uint8_t* block) { at = reinterpret_cast<const uint32_t*>(block); }
    // Hides from the compiler that the same addresses are read again.
    void Reload() { asm("" : "+r"(at)); }
    AWQD_ALWAYS_INLINE Vec::F Get(const Cell* cells, int c, int run) const {
      return Vec::Lookup(cells[c], at + c * 16, 4 * run);
    }
  };
};

// Codes of 1 to 3 bits. Lanes are widened to 32 bits, once for a block.
struct Narrow : Tables {
  static int64_t BlockBytes(const K16Weight& w) { return w.block_bytes; }

  template <int kColumns>
  struct Block {
    const uint8_t* opened = nullptr;
    const int bits;
    alignas(64) uint32_t words[kColumns * 16] = {};

    explicit Block(const K16Weight& w) : bits(w.bits) {}
    void Open(const uint8_t* block) {
      if (block == opened) return;
      opened = block;
      for (int c = 0; c < kColumns; ++c) {
        Vec::WidenLanes(block + c * 16 * bits, bits, words + c * 16);
      }
    }
    void Reload() {}
    AWQD_ALWAYS_INLINE Vec::F Get(const Cell* cells, int c, int run) const {
      return Vec::Lookup(cells[c], words + c * 16, bits * run);
    }
  };
};

// Codes of 8 bits: a conversion. With kAffine a multiplication and a subtraction in one, which
// bring scale and zero; without, weights want neither, or their scale is for the sums.
template <Code kCode, bool kAffine>
struct Bytes {
  static constexpr bool kCells = kAffine;
  // Factor and addend that the conversion leaves out.
  static constexpr float kScale = kCode == Code::kE4m3 ? 256 : 1;
  static constexpr float kOffset = kCode == Code::kInteger ? 128 : 0;
  static constexpr int64_t BlockBytes(const K16Weight&) { return 128; }

  struct Cell {
    float scale;
    float offset;
  };
  static void MakeCells(const K16Weight& w, int64_t tile, int64_t first, int64_t last,
                        Cell* cells) {
    for (int64_t group = first; group <= last; ++group, cells += 8) {
      float scales[8], offsets[8];
      LoadAffine(w, tile, group, scales, offsets);
      for (int c = 0; c < 8; ++c) {
        cells[c].scale = scales[c] * kScale;
        cells[c].offset = offsets[c] - kOffset * scales[c];
      }
    }
  }

  template <int kColumns>
  struct Block {
    const uint8_t* at = nullptr;

    explicit Block(const K16Weight&) {}
    void Open(const uint8_t* block) { at = block; }
    void Reload() {}
    AWQD_ALWAYS_INLINE Vec::F Get(const Cell* cells, int c, int run) const {
      const uint8_t* bytes = at + c * 128 + run * 16;
      const Vec::F code = kCode == Code::kE4m3 ? Vec::E4m3(bytes) : Vec::Signed(bytes);
      if constexpr (!kAffine) return code;
      return Vec::Fms(code, Vec::Set(cells[c].scale), Vec::Set(cells[c].offset));
    }
  };
};

}  // namespace
}  // namespace awqd::cpu
