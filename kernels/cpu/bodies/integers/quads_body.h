// Products of quantised activations by quads: four codes of a column times four INT8 q, added up in
// one lane. Of 4 or 8 bits, of groups of whole runs of 16 rows, or one. The same sums as in
// panel_product.h: exact over a group, scaled and added in FP32.
//
// Here, of groups of whole blocks: a vector has codes of a column as they are stored, with lanes
// along K, which are folded where a group ends. Integer zeros are taken off a group's sum by the
// sum of its q, exactly. Rows of a quad are then 32 apart, of 4 bits, and q is in that order
// (OrderQuads). Many tokens, and smaller groups: byte_panel_product.h, where a machine has VNNI. The
// bits are the same.
//
// Included by body files behind column_product.h and panel_product.h; everything has
// internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/column_product.h"
#include "kernels/cpu/bodies/integers/panel_product.h"

namespace awqd::cpu {
namespace {

inline bool HasWholeBlocks(const K16Weight& w) {
  return w.groups == 1 || w.runs_per_group % 8 == 0;
}

// One token: rows of each block in the order of codes, and the sums of groups.
void OrderQuads(const K16Weight& w, const int8_t* x, const QuadToken& out) {
  const int bits = HasWholeBlocks(w) ? w.bits : 8;
  const int64_t of_group = w.groups == 1 ? w.runs : w.runs_per_group;
  int32_t* sums = out.sums;
  int64_t left = of_group;
  Pairs sum = Pairs::Set(0);
  for (int64_t block = 0; block < w.blocks; ++block) {
    const int64_t first = block * kIntegerRows;
    const int64_t count = w.k - first < kIntegerRows ? w.k - first : kIntegerRows;
    alignas(64) int8_t rows[kIntegerRows] = {};
    std::memcpy(rows, x + first, count);
    Pairs q[8];
    for (int i = 0; i < 8; ++i) q[i] = Pairs::Signed(rows + 16 * i);
    StoreDigit(q, bits, out.values + block * kIntegerRows);
    for (int i = 0; i < 8 && block * 8 + i < w.runs; ++i) {
      sum = sum.Plus(q[i]);
      if (--left > 0 && block * 8 + i + 1 < w.runs) continue;
      *sums++ = sum.SumOfAll();
      sum = Pairs::Set(0);
      left = of_group;
    }
  }
}

// A tile for kTokens tokens, whose sums go to out[t * 8 + c].
template <int kBits, int kTokens>
__attribute__((noinline)) void QuadTile(const K16Weight& w, const QuadTask& task, int64_t tile,
                                        int64_t token, const TileFactors& factors, float* out) {
  constexpr int64_t kColumnBytes = kBits * 16, kTileBytes = 8 * kColumnBytes;
  const int64_t row_bytes = w.blocks * kIntegerRows;
  const uint8_t* codes = w.codes + tile * w.blocks * kTileBytes;
  const int8_t* x = task.x + token * row_bytes;
  Eight::F acc[kTokens];
  Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE { acc[t] = Eight::Set(0); });
  for (int64_t group = 0, block = 0; group < w.groups; ++group) {
    const int64_t border = block + BlocksOfGroup(w), end = border < w.blocks ? border : w.blocks;
    ByteLanes::Sums sums[kTokens][8];
    Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
      Times<8>([&](auto c) AWQD_ALWAYS_INLINE { sums[t][c] = ByteLanes::Zero(); });
    });
    for (; block < end; ++block, codes += kTileBytes, x += kIntegerRows) {
      PrefetchBlocks<kTileBytes>(codes);
      Times<8>([&](auto c) AWQD_ALWAYS_INLINE {
        const auto column = ByteLanes::Column<kBits>::Load(codes + c * kColumnBytes);
        Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
          sums[t][c] = ByteLanes::OneDigit(column, x + t * row_bytes, sums[t][c]);
        });
      });
    }
    const Eight::F scale = Eight::Load(factors.scales + group * 8);
    const Eight::F offset = Eight::Load(factors.offsets + group * 8);
    const Eight::I zero = Eight::LoadInts(factors.zeros + group * 8);
    Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
      const int32_t x_sum = task.sums[(token + t) * w.groups + group];
      const Eight::I sum = FoldColumns(w, sums[t], zero, x_sum);
      acc[t] =
          AddGroupOf8(w, Eight::ToFloat(sum), static_cast<float>(x_sum), scale, offset, acc[t]);
    });
  }
  Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE { Eight::Store(out + t * 8, acc[t]); });
}

template <int kBits>
void FewByQuadsOf(const K16Weight& w, const QuadTask& task) {
  const TileFactors factors(w, static_cast<float*>(task.scratch));
  float sums[kScaledRows * 8];
  for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
    factors.Make(w, tile);
    ForParts<ByteLanes::kTokens>(task.rows, [&](int64_t begin, auto n) {
      QuadTile<kBits, n.kValue>(w, task, tile, begin, factors, sums + begin * 8);
    });
    StoreTile(w, task, tile, task.x_scale, sums, 8);
  }
}

void FewByQuads(const K16Weight& w, const QuadTask& task) {
  if (w.bits == 8) return FewByQuadsOf<8>(w, task);
  FewByQuadsOf<4>(w, task);
}

}  // namespace
}  // namespace awqd::cpu
