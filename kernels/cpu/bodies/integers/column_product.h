// Products of few tokens of integers. A vector has codes of one column as they are stored, 4 or 8
// bits, with lanes along K (byte_dot.h), which are folded where a span ends. INT8 activations are
// one plane of bytes, INT16 activations two; the order of their rows is that of the codes. Groups
// are whole blocks of 128 rows, or all of K.
//
//   y[n] = sum over spans of scale * (step * sum(q * (code - zero)))
//
// A span is a group for INT8 and a block for INT16, as in panel_product.h. Its sum is an exact
// INT32 (128 * 255 * 32512 < 2^31; INT8 has at most 2^16 rows in a group), from which integer zeros
// are taken off by the sum of q. So a token's bits depend neither on its batch nor on the product
// that multiplied it.
//
// Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/byte_dot.h"
#include "kernels/cpu/bodies/integers/int16_block.h"
#include "kernels/cpu/bodies/integers/panel_product.h"

namespace awqd::cpu {
namespace {

// --- Prologue ---

inline bool HasWholeBlocks(const K16Weight& w) {
  return w.groups == 1 || w.runs_per_group % kBlockRuns == 0;
}
inline int64_t BlocksOfGroup(const K16Weight& w) {
  return w.groups == 1 ? w.blocks : w.runs_per_group / kBlockRuns;
}

// FP16 or BF16, as planes where bytes are multiplied.
[[maybe_unused]] bool MakeInt16Planes(const K16Weight& w, const void* x, Element type,
                                      const IntegerToken& out) {
  if (ByteDot::HasPlanes(w.bits)) return MakeInt16<true>(w, x, type, out);
  return MakeInt16<false>(w, x, type, out);
}

// INT8: the rows of each block in the order of codes where groups are whole blocks, and the sums of
// groups.
[[maybe_unused]] bool OrderInt8(const K16Weight& w, const void* x, Element,
                                const IntegerToken& out) {
  const int bits = HasWholeBlocks(w) ? w.bits : 8;
  const int64_t runs_of_group = w.groups == 1 ? w.runs : w.runs_per_group;
  int32_t* sums = out.sums;
  int64_t left = runs_of_group;
  IntVec sum = IntVec::Set(0);
  for (int64_t block = 0; block < w.blocks; ++block) {
    const int64_t first = block * kBlockRows;
    const int64_t count = w.k - first < kBlockRows ? w.k - first : kBlockRows;
    alignas(64) int8_t rows[kBlockRows] = {};
    std::memcpy(rows, static_cast<const int8_t*>(x) + first, count);
    IntVec q[8];
    for (int i = 0; i < 8; ++i) q[i] = IntVec::WidenSigned(rows + 16 * i);
    StorePlane(q, bits, static_cast<int8_t*>(out.q) + first);
    for (int i = 0; i < 8 && block * 8 + i < w.runs; ++i) {
      sum = sum + q[i];
      if (--left > 0 && block * 8 + i + 1 < w.runs) continue;
      *sums++ = sum.SumOfAll();
      sum = IntVec::Set(0);
      left = runs_of_group;
    }
  }
  return true;
}

// --- Multiplying ---

// The scales and zeros of the groups of a tile.
struct TileFactors {
  float* scales;   // [groups][8]
  float* offsets;  // [groups][8]: real zeros, negated
  // [groups][8], times the sum of q: what sums of bytes lack, less integer zeros.
  int32_t* zeros;

  TileFactors(const K16Weight& w, float* memory)
      : scales(memory),
        offsets(memory + w.groups * 8),
        zeros(reinterpret_cast<int32_t*>(memory + 2 * w.groups * 8)) {}

  void Load(const K16Weight& w, int64_t tile) const {
    for (int64_t group = 0; group < w.groups; ++group) {
      float values[8];
      PrefetchCells(w, tile, group);
      LoadCells(w, tile, group, scales + group * 8, values);
      for (int c = 0; c < 8; ++c) offsets[group * 8 + c] = 0 - values[c];
      const int32_t bias = ByteDot::Bias(w.bits);
      if (HasIntegerZeros(w)) {
        for (int c = 0; c < 8; ++c) zeros[group * 8 + c] = bias - static_cast<int32_t>(values[c]);
      } else if (bias != 0) {
        for (int c = 0; c < 8; ++c) zeros[group * 8 + c] = bias;
      }
    }
  }
};

// Fetches the block that is 16 blocks away, of this tile or the next.
template <int64_t kBytes>
AWQD_ALWAYS_INLINE inline void PrefetchBlocks(const uint8_t* codes) {
  for (int64_t line = 0; line < kBytes; line += 64) {
    __builtin_prefetch(codes + 16 * kBytes + line, kRead, kL2Cache);
  }
}

// A tile for kTokens tokens from `token` on, whose sums go to out[t * 8 + c]. kBytes: of INT8 or
// INT16, 1 or 2.
template <int kBits, int kBytes, int kTokens>
__attribute__((noinline)) void MultiplyTile(const K16Weight& w, const IntegerTask& task,
                                            int64_t tile, int64_t token, const TileFactors& factors,
                                            float* out) {
  constexpr int64_t kColumnBytes = kBits * 16, kTileBytes = 8 * kColumnBytes;
  constexpr bool kInt16 = kBytes == 2;
  const int64_t stride = w.blocks * kBytes * kBlockRows;
  const int64_t spans = kInt16 ? w.blocks : w.groups;
  const uint8_t* codes = w.codes + tile * w.blocks * kTileBytes;
  const int8_t* x = static_cast<const int8_t*>(task.q) + token * stride;
  Columns8::F acc[kTokens];
  Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE { acc[t] = Columns8::Set(0); });
  Lanes32 sums[kTokens][8];
  const ZerosOfSums zeros = RealZeros(w);
  const auto add_span = [&](int64_t group, int64_t span) AWQD_ALWAYS_INLINE {
    const Columns8::F scale = Columns8::Load(factors.scales + group * 8);
    const Columns8::F offset = Columns8::Load(factors.offsets + group * 8);
    const Columns8::I zero = Columns8::LoadInts(factors.zeros + group * 8);
    Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
      const int64_t at = (token + t) * spans + span;
      const int32_t q_sum = task.sums[at];
      auto x_sum = static_cast<float>(q_sum);
      Columns8::I sum = Columns8::Fold(sums[t]);
      if (HasIntegerZeros(w) || ByteDot::Bias(kBits) != 0) {
        sum = Columns8::AddTimes(sum, zero, q_sum);
      }
      Columns8::F value = Columns8::ToFloat(sum);
      if constexpr (kInt16) {
        value = Columns8::Mul(value, Columns8::Set(task.steps[at]));
        x_sum *= task.steps[at];
      }
      acc[t] = AddSpan<Columns8>(zeros, value, Columns8::Set(x_sum), scale, offset, acc[t]);
    });
  };
  for (int64_t group = 0, block = 0; group < w.groups; ++group) {
    const int64_t border = block + BlocksOfGroup(w), end = border < w.blocks ? border : w.blocks;
    if constexpr (!kInt16) {
      Times<kTokens * 8>([&](auto i) AWQD_ALWAYS_INLINE { sums[i / 8][i % 8] = Lanes32{}; });
    }
    for (; block < end; ++block, codes += kTileBytes, x += kBytes * kBlockRows) {
      PrefetchBlocks<kTileBytes>(codes);
      Times<8>([&](auto c) AWQD_ALWAYS_INLINE {
        if constexpr (kInt16) {
          const auto column = ByteDot::Int16Column<kBits>::Load(codes + c * kColumnBytes);
          Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
            sums[t][c] = column.MultiplyInt16(x + t * stride);
          });
        } else {
          const auto column = ByteDot::Column<kBits>::Load(codes + c * kColumnBytes);
          Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
            sums[t][c] = column.AddPlane(x + t * stride, sums[t][c]);
          });
        }
      });
      if constexpr (kInt16) add_span(group, block);
    }
    if constexpr (!kInt16) add_span(group, group);
  }
  Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE { Columns8::Store(out + t * 8, acc[t]); });
}

template <int kBits, int kBytes>
void MultiplyTiles(const K16Weight& w, const IntegerTask& task) {
  constexpr int kTokens = ByteDot::kTokens;
  auto* const scratch = static_cast<float*>(task.scratch);
  const TileFactors factors(w, scratch);
  float* const sums = scratch + 3 * w.groups * 8;
  // Equal parts: 4 tokens are 2 and 2, not 3 and 1.
  const int64_t parts = (task.rows + kTokens - 1) / kTokens;
  for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
    factors.Load(w, tile);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = task.rows * part / parts, end = task.rows * (part + 1) / parts;
      WithCount<1, kTokens>(end - begin, [&](auto n) {
        MultiplyTile<kBits, kBytes, n.kValue>(w, task, tile, begin, factors, sums + begin * 8);
      });
    }
    StoreTile(w, task, tile, sums, 8);
  }
}

// kBytes: of INT8 or INT16 activations, 1 or 2.
template <int kBytes>
void ColumnProduct(const K16Weight& w, const IntegerTask& task) {
  if (w.bits == 8) return MultiplyTiles<8, kBytes>(w, task);
  MultiplyTiles<4, kBytes>(w, task);
}

// Entries of a body's tables.
constexpr IntegerProduct kInt16Columns = {.prologue = MakeInt16Planes,
                                          .product = ColumnProduct<2>,
                                          .int16 = true,
                                          .token_bytes = kInt16BlockBytes};
constexpr IntegerProduct Int16Panels(int64_t min_tokens, int64_t min_tokens_8bit) {
  return {.prologue = MakeInt16<false>,
          .product = Int16PanelProduct,
          .int16 = true,
          .token_bytes = kInt16BlockBytes,
          .min_tokens = min_tokens,
          .min_tokens_8bit = min_tokens_8bit};
}
constexpr IntegerProduct Int8Columns(int64_t max_tokens = IntegerProduct::kNoLimit,
                                     int64_t max_tokens_8bit = IntegerProduct::kNoLimit) {
  return {.prologue = OrderInt8,
          .product = ColumnProduct<1>,
          .token_bytes = kBlockRows,
          .max_tokens = max_tokens,
          .max_tokens_8bit = max_tokens_8bit};
}

}  // namespace
}  // namespace awqd::cpu
