// Decoding to matrices, written once over Vec. Everything has internal linkage.
//
// Computes: out = the weight as kernels/exact.h says, and one rounding. Weight layout: k16, whose
// codes are transposed in a buffer that stays in the L1 cache: lanes of up to 4 bits a block at a
// time (64 shuffles turn 2048 weights), bytes a run at a time. Then rows are decoded, 16 columns at
// once. Work split: a task is one block of rows by up to 256 columns.
#pragma once

#include <cstring>

#include "kernels/cpu/bodies/codes.h"

namespace awqd::cpu {
namespace {

constexpr int64_t kChunk = kDequantizeTiles * 8;  // columns

struct Chunk {
  alignas(64) uint32_t lanes[16][kChunk];
  alignas(64) uint8_t bytes[16][kChunk];
  alignas(64) float scales[kChunk];
  alignas(64) float zeros[kChunk];
  alignas(64) float outer[kChunk];
  // Added to codes and zeros alike: the bits of an integer below it are those of the sum.
  float magic = 0;
  int64_t group = -1;
  int64_t run = -1;  // of `bytes`
};

// Lane words of a column's block, in `spare` unless they lie in memory as they are.
inline const uint32_t* LanesOf(const K16Weight& w, const uint8_t* block, uint32_t* spare) {
  if (w.bits == 4) return reinterpret_cast<const uint32_t*>(block);
  for (int c = 0; c < 8; ++c) Vec::WidenLanes(block + c * w.block_bytes, w.bits, spare + c * 16);
  return spare;
}

inline void LoadBlock(const K16Weight& w, int64_t first_tile, int64_t tiles, int64_t block,
                      Chunk* chunk) {
  alignas(64) uint32_t spare[8 * 16];
  if (w.bits <= 4) {
    for (int64_t t = 0; t < tiles; ++t) {
      const uint8_t* at = w.codes + ((first_tile + t) * w.blocks + block) * 8 * w.block_bytes;
      TransposeTile(LanesOf(w, at, spare), chunk->lanes[0] + t * 8, kChunk);
    }
  }
  for (int64_t c = 0; c < tiles * 8; ++c) {
    const int64_t n = first_tile * 8 + c;
    chunk->outer[c] = w.outer != nullptr && n < w.n ? w.outer[n] : 1;
  }
}

inline void LoadRun(const K16Weight& w, int64_t first_tile, int64_t tiles, int64_t block,
                    int64_t run, Chunk* chunk) {
  if (w.bits <= 4 || run == chunk->run) return;
  chunk->run = run;
  for (int64_t t = 0; t < tiles; ++t) {
    const uint8_t* at = w.codes + ((first_tile + t) * w.blocks + block) * 8 * w.block_bytes;
    TransposeTileOfBytes(at + run * 16, w.block_bytes, chunk->bytes[0] + t * 8, kChunk);
  }
}

inline void LoadGroup(const K16Weight& w, int64_t first_tile, int64_t tiles, int64_t group,
                      Chunk* chunk) {
  if (group == chunk->group) return;
  chunk->group = group;
  const float magic = chunk->magic;
  for (int64_t t = 0; t < tiles; ++t) {
    float* zeros = chunk->zeros + t * 8;
    LoadCells(w, first_tile + t, group, chunk->scales + t * 8, zeros);
    if (magic == 0) continue;  // which would take the sign off a real zero
    for (int c = 0; c < 8; ++c) zeros[c] += magic;
  }
}

// A row of the chunk, 16 weights(c) from column c on. `columns` is a multiple of 8; what lies
// behind them in the chunk is computed and dropped.
template <typename Weights>
AWQD_ALWAYS_INLINE inline void StoreRow(int64_t columns, Element type, bool stream, void* out,
                                        Weights weights) {
  int64_t c = 0;
  if (stream) {
    for (; c + 32 <= columns; c += 32) {
      const Vec::F a = weights(c), b = weights(c + 16);
      Vec::Stream16To(out, type, c, a);
      Vec::Stream16To(out, type, c + 16, b);
    }
  }
  for (; c + 16 <= columns; c += 16) Vec::Store16To(out, type, c, weights(c));
  if (c == columns) return;
  alignas(64) float v[16];
  Vec::Store(v, weights(c));
  Store8Plus(out, type, c, v, nullptr);
}

// The same from the values of codes; each step is one rounding.
template <typename Values>
AWQD_ALWAYS_INLINE inline void EmitRow(const K16Weight& w, const Chunk& chunk, int64_t columns,
                                       Element type, bool stream, void* out, Values values) {
  const float *scales = chunk.scales, *zeros = chunk.zeros, *outer = chunk.outer;
  if (!w.zero_after && w.outer == nullptr) {
    return StoreRow(columns, type, stream, out, [&](int64_t c) AWQD_ALWAYS_INLINE {
      return Vec::Mul(Vec::Sub(values(c), Vec::Load(zeros + c)), Vec::Load(scales + c));
    });
  }
  const bool after = w.zero_after;
  StoreRow(columns, type, stream, out, [&](int64_t c) AWQD_ALWAYS_INLINE {
    const Vec::F scale = Vec::Load(scales + c), zero = Vec::Load(zeros + c);
    const Vec::F weight = after ? Vec::Sub(Vec::Mul(values(c), scale), zero)
                                : Vec::Mul(Vec::Sub(values(c), zero), scale);
    return Vec::Mul(weight, Vec::Load(outer + c));
  });
}

// Row 16 j + i of the block that the chunk holds.
AWQD_ALWAYS_INLINE inline void DecodeRow(const K16Weight& w, const Chunk& chunk, int i, int j,
                                         int64_t columns, Element type, bool stream, void* out) {
  const uint32_t* lanes = chunk.lanes[i];
  const uint8_t* bytes = chunk.bytes[i];
  const int shift = j * w.bits, mask = (1 << w.bits) - 1;
  if (w.code == Code::kE4m3) {
    return EmitRow(w, chunk, columns, type, stream, out, [&](int64_t c) AWQD_ALWAYS_INLINE {
      return Vec::Mul(Vec::E4m3(bytes + c), Vec::Set(256));
    });
  }
  if (w.bits == 8) {
    return EmitRow(w, chunk, columns, type, stream, out,
                   [&](int64_t c) AWQD_ALWAYS_INLINE { return Vec::Flipped(bytes + c); });
  }
  if (chunk.magic != 0) {
    return EmitRow(w, chunk, columns, type, stream, out, [&](int64_t c) AWQD_ALWAYS_INLINE {
      return Vec::Magic(lanes + c, shift, mask);
    });
  }
  const Vec::F table = Vec::Load(w.values);
  EmitRow(w, chunk, columns, type, stream, out,
          [&](int64_t c) AWQD_ALWAYS_INLINE { return Vec::Lookup(table, lanes + c, shift); });
}

void Dequantize(const K16Weight& w, const DequantizeTask& task) {
  Chunk chunk;
  const int64_t first_tile = task.col_begin / 8;
  const int64_t tiles = (task.col_end + 7) / 8 - first_tile;
  if (w.code == Code::kInteger && w.bits <= 4 && w.zero_type == Element::kByte) {
    chunk.magic = 0x1p23f;
  }
  LoadBlock(w, first_tile, tiles, task.block, &chunk);
  const int64_t size = ElementBytes(task.out_type);
  const bool whole = task.col_begin % 8 == 0 && task.col_end % 8 == 0;
  const int64_t padded_group = w.runs_per_group * 16, tile_bytes = 8 * w.block_bytes;
  const int64_t stride = w.blocks * tile_bytes;  // from one tile to the next
  const uint8_t* next = w.codes + (first_tile * w.blocks + task.block + 1) * tile_bytes;
  int64_t fetched = 0;  // tiles of the next block
  for (int64_t row = task.row_begin; row < task.row_end; ++row) {
    const int64_t group = row / w.group_size;
    const int64_t padded = group * padded_group + row % w.group_size - task.block * 128;
    const int i = static_cast<int>(padded % 16), j = static_cast<int>(padded / 16);
    LoadGroup(w, first_tile, tiles, group, &chunk);
    LoadRun(w, first_tile, tiles, task.block, j, &chunk);
    // 128 rows bring the lines of the next block, which hardware prefetchers do not foresee.
    if (padded % 4 == 0 && fetched < tiles) {
      const uint8_t* lines = next + fetched++ * stride;
      for (int64_t at = 0; at < tile_bytes; at += 64) __builtin_prefetch(lines + at, 0, 2);
    }
    char* out = static_cast<char*>(task.out) + (row - task.row_begin) * task.out_stride * size;
    alignas(64) float spare[kChunk];
    const bool stream = task.stream && whole && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    DecodeRow(w, chunk, i, j, tiles * 8, task.out_type, stream,
              whole ? static_cast<void*>(out) : spare);
    if (whole) continue;
    __builtin_memcpy(out, reinterpret_cast<char*>(spare) + task.col_begin % 8 * size,
                     (task.col_end - task.col_begin) * size);
  }
  if (task.stream) StreamFence();
}

template <typename Codes>
void ColumnsOf(const K16Weight& w, int64_t tile, float* out, int64_t stride) {
  const int64_t block_bytes = Codes::BlockBytes(w);
  const uint8_t* codes = w.codes + tile * w.blocks * 8 * block_bytes;
  typename Codes::template Block<8> block(w);
  float outer[8];
  LoadOuter(w, tile, outer);
  int64_t run = 0;
  for (int64_t group = 0; group < w.groups; ++group) {
    typename Codes::Cell cells[8];
    Codes::MakeCells(w, tile, group, group, cells);
    for (int64_t r = 0; r < w.runs_per_group && run < w.runs; ++r, ++run) {
      block.Open(codes + run / 8 * 8 * block_bytes);
      // Padding of this group is overwritten by the next one's first run.
      float* row = out + group * w.group_size + r * 16;
      for (int c = 0; c < 8; ++c) {
        Vec::F v = block.Get(cells, c, static_cast<int>(run % 8));
        if (w.outer != nullptr) v = Vec::Mul(v, Vec::Set(outer[c]));
        Vec::Store(row + c * stride, v);
      }
    }
  }
}

void Columns(const K16Weight& w, int64_t tile, float* out, int64_t stride) {
  if (w.bits == 4) return ColumnsOf<Nibbles>(w, tile, out, stride);
  if (w.bits < 4) return ColumnsOf<Narrow>(w, tile, out, stride);
  if (w.code == Code::kE4m3) return ColumnsOf<Bytes<Code::kE4m3, true>>(w, tile, out, stride);
  ColumnsOf<Bytes<Code::kInteger, true>>(w, tile, out, stride);
}

void ToFloat(const void* in, Element type, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) Load8To(in, type, i, out + i);
  for (; i < count; ++i) out[i] = Load1(in, type, i);
}

void FromFloat(const float* in, const float* bias, int64_t count, Element type, void* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    Store8Plus(out, type, i, in + i, bias != nullptr ? bias + i : nullptr);
  }
  for (; i < count; ++i) Store1(out, type, i, bias != nullptr ? in[i] + bias[i] : in[i]);
}

int32_t LargestBits(const float* in, int64_t count) {
  const auto larger = [](Ints a, Ints b) { return a > b ? a : b; };
  Ints largest = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    largest = larger(largest, LoadAs<Ints>(in + i) & 0x7fffffff);
  }
  return FoldLanes(largest, larger);
}

void ToInt8(const float* in, int64_t count, float scale, float least, int8_t* out) {
  for (int64_t i = 0; i < count; i += 16) {
    const Vec::F value = Vec::Div(Vec::Load(in + i), Vec::Set(scale));
    int8_t bytes[16];
    IntVec::Round(Vec::Min(Vec::Max(value, Vec::Set(least)), Vec::Set(127))).StoreBytes(bytes);
    std::memcpy(out + i, bytes, count - i < 16 ? count - i : 16);
  }
}

}  // namespace
}  // namespace awqd::cpu
