// Codes: how a block of layout k16 becomes 16 weights at a time, one struct for each way. The loops
// of register_tile.h, product_body.h and dequantize_body.h are written once over them and over Vec.
// Everything has internal linkage.
//
//   Cell                what is made once per group and column
//   kCells              whether it makes any
//   BlockBytes          of a column's block
//   MakeCells           [groups first to last][8 columns] of a tile
//   Block<kColumns>     some columns of a block: Open, then weights by run and column
#pragma once

#include "kernels/cpu/bodies/cells.h"
#include "kernels/cpu/bodies/unroll.h"

namespace awqd::cpu {
namespace {

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
    template <int kRun>
    Vec::F Get(const Cell* cells, int c, Number<kRun>) const {
      return Vec::template LookupAt<4 * kRun>(cells[c], at + c * 16);
    }
    Vec::F Get(const Cell* cells, int c, int run) const {
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
    Vec::F Get(const Cell* cells, int c, int run) const {
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
    Vec::F Get(const Cell* cells, int c, int run) const {
      const uint8_t* bytes = at + c * 128 + run * 16;
      const Vec::F code = kCode == Code::kE4m3 ? Vec::E4m3(bytes) : Vec::Signed(bytes);
      if constexpr (!kAffine) return code;
      return Vec::Fms(code, Vec::Set(cells[c].scale), Vec::Set(cells[c].offset));
    }
  };
};

}  // namespace
}  // namespace awqd::cpu
