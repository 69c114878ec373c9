// Decoding to matrices, written once over Vec. Included by one source per instruction set, after
// product_body.h; everything has internal linkage.
//
// Computes: out = (q - z) * s with one rounding. Weight layout: k16, whose words are transposed in
// a buffer that stays in the L1 cache: 64 shuffles turn 2048 weights. Then each row is a shift, a
// bit operation, a subtraction (of integers below 2^24: exact) and a product.
// Work split: a task is one block of rows by up to 256 columns.
#pragma once

#include "kernels/cpu/bodies.h"

namespace awqd::cpu {
namespace {

constexpr int64_t kChunk = kDequantizeTiles * 8;  // columns

struct Chunk {
  alignas(64) uint32_t words[16][kChunk];
  alignas(64) float scales[kChunk];
  alignas(64) float magic_zeros[kChunk];
  int64_t group = -1;
};

inline void LoadCells(const K16Weight& w, int64_t first_tile, int64_t tiles, int64_t group,
                      Chunk* chunk) {
  if (group == chunk->group) return;
  chunk->group = group;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t cell = ((first_tile + t) * w.groups + group) * 8;
    float* zeros = chunk->magic_zeros + t * 8;
    Load8To(w.scales, w.scale_type, cell, chunk->scales + t * 8);
    if (w.zeros != nullptr) Zeros8(w.zeros + cell, zeros);
    for (int c = 0; c < 8; ++c) {
      zeros[c] = 8388608.0f + (w.zeros != nullptr ? zeros[c] : w.zero);
    }
  }
}

// `columns` is a multiple of 8; what lies behind them in the chunk is computed and dropped.
inline void EmitRow(const Chunk& chunk, int i, int j, int64_t columns, Element type, bool stream,
                    void* out) {
  int64_t c = 0;
  if (stream) {
    const int64_t size = type == Element::kFp32 ? 4 : 2;
    for (; c + 32 <= columns; c += 32) {
      const Vec::F a = Vec::Weights(chunk.words[i] + c, j, chunk.scales + c, chunk.magic_zeros + c);
      const Vec::F b = Vec::Weights(chunk.words[i] + c + 16, j, chunk.scales + c + 16,
                                    chunk.magic_zeros + c + 16);
      Vec::Stream32(a, b, type, static_cast<char*>(out) + c * size);
    }
  }
  for (; c < columns; c += 16) {
    alignas(64) float v[16];
    Vec::Store(v, Vec::Weights(chunk.words[i] + c, j, chunk.scales + c, chunk.magic_zeros + c));
    Store8Plus(out, type, c, v, nullptr);
    if (c + 8 < columns) Store8Plus(out, type, c + 8, v + 8, nullptr);
  }
}

inline void CopyElements(const void* in, int64_t begin, int64_t count, Element type, void* out) {
  const int64_t size = type == Element::kFp32 ? 4 : 2;
  const char* from = static_cast<const char*>(in) + begin * size;
  char* to = static_cast<char*>(out);
  for (int64_t i = 0; i < count * size; ++i) to[i] = from[i];
}

void Dequantize(const K16Weight& w, const DequantizeTask& task) {
  Chunk chunk;
  const int64_t first_tile = task.col_begin / 8;
  const int64_t tiles = (task.col_end + 7) / 8 - first_tile;
  for (int64_t t = 0; t < tiles; ++t) {
    Vec::Transpose(w.codes + ((first_tile + t) * w.blocks + task.block) * 128,
                   chunk.words[0] + t * 8, kChunk);
  }
  const int64_t size = task.out_type == Element::kFp32 ? 4 : 2;
  const bool whole = task.col_begin % 8 == 0 && task.col_end % 8 == 0;
  const int64_t padded_group = w.runs_per_group * 16;
  const uint32_t* next = w.codes + (first_tile * w.blocks + task.block + 1) * 128;
  for (int64_t row = task.row_begin; row < task.row_end; ++row) {
    const int64_t group = row / w.group_size;
    const int64_t padded = group * padded_group + row % w.group_size - task.block * 128;
    LoadCells(w, first_tile, tiles, group, &chunk);
    // 128 rows bring the 256 lines of the next block, which hardware prefetchers do not foresee.
    if (padded / 4 < tiles) {
      const uint32_t* lines = next + padded / 4 * w.blocks * 128 + padded % 4 * 32;
      __builtin_prefetch(lines, 0, 2);
      __builtin_prefetch(lines + 16, 0, 2);
    }
    const int i = static_cast<int>(padded % 16), j = static_cast<int>(padded / 16);
    char* out = static_cast<char*>(task.out) + (row - task.row_begin) * task.out_stride * size;
    if (whole) {
      const bool aligned = reinterpret_cast<uintptr_t>(out) % 64 == 0;
      EmitRow(chunk, i, j, tiles * 8, task.out_type, task.stream && aligned, out);
      continue;
    }
    alignas(64) float spare[kChunk];
    EmitRow(chunk, i, j, tiles * 8, task.out_type, false, spare);
    CopyElements(spare, task.col_begin - first_tile * 8, task.col_end - task.col_begin,
                 task.out_type, out);
  }
  if (task.stream) StreamFence();
}

void Columns(const K16Weight& w, int64_t tile, float* out, int64_t stride) {
  const uint32_t* words = w.codes + tile * w.blocks * 128;
  int64_t run = 0;
  for (int64_t group = 0; group < w.groups; ++group) {
    Vec::Table tables[8];
    MakeTables(w, tile, group, tables);
    for (int64_t r = 0; r < w.runs_per_group; ++r, ++run) {
      const uint32_t* block = words + run / 8 * 128;
      // Padding of this group is overwritten by the next one's first run.
      float* row = out + group * w.group_size + r * 16;
      for (int c = 0; c < 8; ++c) {
        Vec::Store(row + c * stride,
                   Vec::Lookup(tables[c], block + c * 16, static_cast<int>(run % 8)));
      }
    }
  }
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

}  // namespace
}  // namespace awqd::cpu
