// The product of quantised activations. Tokens are multiplied by panels (panel.h), which hold two
// rows of a column in each lane, by the instruction that multiplies two pairs and adds both
// products. So a lane's sum is a column's, and nothing is folded.
//
// A sum of integers goes over all of a group, exactly: INT32 holds a piece, 512 rows, of the
// largest weights (128 * 128 * 255 * 512 < 2^31), and INT64 the sums of longer groups. Sums of
// groups are scaled and added in FP32, in the order of groups:
//
//   zeros           a group adds
//   integers        s * sum(q * (code - zero))
//   real, before    s * (sum(q * code) - zero * sum(q))
//   real, after     s * sum(q * code) - zero * sum(q)
//
// INT8 scales beside integer zeros are multiplied into the 16-bit integers, which hold 128 * 255.
// Then, as without any scale, the weights are integers, and all of K is one group.
//
// Included by each body file once, behind its flags, its Vec and its product; everything has
// internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/panel.h"

namespace awqd::cpu {
namespace {

// Where a thread keeps the tiles that it multiplies. 64-byte aligned throughout.
struct ScaledScratch {
  static constexpr int64_t kPanel = kRunsOfPiece * kPairsOfRun * kPanelColumns;
  static constexpr int64_t kSums = kScaledRows * kPanelColumns;
  static constexpr int64_t kBytes = 4 * (kPanel + 3 * kSums + 2 * kRunsOfPiece * kPanelColumns);

  uint32_t* panel;  // [pairs of the piece][kPanelColumns]
  int64_t* totals;  // [rows][kPanelColumns]: of a group that is longer than a piece
  float* sums;      // [rows][kPanelColumns]
  float* scales;    // [groups of the piece][kPanelColumns]
  float* offsets;   // likewise: real zeros, negated

  explicit ScaledScratch(void* memory)
      : panel(static_cast<uint32_t*>(memory)),
        totals(reinterpret_cast<int64_t*>(panel + kPanel)),
        sums(reinterpret_cast<float*>(totals + kSums)),
        scales(sums + kSums),
        offsets(scales + kRunsOfPiece * kPanelColumns) {}
};

// What the sums of groups [first, last] are multiplied by, and their real zeros.
void LoadFactors(const PanelOf& p, int64_t first, int64_t last, const ScaledScratch& scratch) {
  const K16Weight& w = p.w;
  for (int64_t group = first; group <= last; ++group) {
    for (int t = 0; t < kPanelTiles; ++t) {
      const int64_t at = (group - first) * kPanelColumns + t * 8;
      const int64_t cell = (p.Tile(t) * w.groups + group) * 8;
      LoadScales(w, cell, scratch.scales + at);
      for (int c = 0; w.integers && c < 8; ++c) scratch.scales[at + c] = 1;
      if (HasIntegerZeros(w)) continue;
      LoadZeros(w, cell, scratch.offsets + at);
      for (int c = 0; c < 8; ++c) scratch.offsets[at + c] = -scratch.offsets[at + c];
    }
  }
}

// --- Multiplying ---

// sums += what a group adds, of 16 columns.
inline void AddGroup(const K16Weight& w, Vec::F value, float x_sum, const float* scales,
                     const float* offsets, float* sums) {
  Vec::F sum = Vec::Load(sums);
  if (HasIntegerZeros(w)) {
    sum = Vec::Fma(value, Vec::Load(scales), sum);
  } else if (w.zero_after) {
    sum = Vec::Fma(value, Vec::Load(scales), sum);
    sum = Vec::Fma(Vec::Load(offsets), Vec::Set(x_sum), sum);
  } else {
    value = Vec::Fma(Vec::Load(offsets), Vec::Set(x_sum), value);
    sum = Vec::Fma(value, Vec::Load(scales), sum);
  }
  Vec::Store(sums, sum);
}

// Adds the products of so many pairs of rows.
template <int kTokens>
AWQD_ALWAYS_INLINE inline void MultiplyPairs(const int16_t* x, int64_t x_stride,
                                             const uint32_t* panel, int64_t pairs,
                                             Pairs::Sums (&sums)[kTokens][Pairs::kVectors]) {
  for (int64_t i = 0; i < pairs; ++i, panel += kPanelColumns) {
    Pairs weights[Pairs::kVectors];
    for (int v = 0; v < Pairs::kVectors; ++v) weights[v] = Pairs::Load(panel + 16 * v);
#pragma GCC unroll 8
    for (int m = 0; m < kTokens; ++m) {
      uint32_t pair;
      std::memcpy(&pair, x + m * x_stride + 2 * i, sizeof(pair));
      const Pairs both = Pairs::Set(pair);
#pragma GCC unroll 2
      for (int v = 0; v < Pairs::kVectors; ++v) sums[m][v].AddProducts(both, weights[v]);
    }
  }
}

// Runs [begin, end) of K, which the panel holds: whole groups or a piece of one.
struct ScaledPiece {
  const PanelOf& panel;
  const ScaledTask& task;
  const ScaledScratch& scratch;
  int64_t group = 0;  // runs of which the sum is scaled
  int64_t begin = 0;
  int64_t end = 0;
};

template <int kTokens>
__attribute__((noinline)) void MultiplyGroups(const ScaledPiece& piece, int64_t m) {
  const K16Weight& w = piece.panel.w;
  const ScaledTask& task = piece.task;
  const ScaledScratch& scratch = piece.scratch;
  int64_t cell = 0;
  for (int64_t run = piece.begin; run < piece.end; run += piece.group) {
    const int64_t left = piece.end - run;
    const int64_t runs = left < piece.group ? left : piece.group;
    Pairs::Sums integers[kTokens][Pairs::kVectors];
    MultiplyPairs<kTokens>(task.x + m * task.x_stride + run * kRowsOfRun, task.x_stride,
                           scratch.panel + (run - piece.begin) * kPairsOfRun * kPanelColumns,
                           runs * kPairsOfRun, integers);
    for (int t = 0; t < kTokens; ++t) {
      const float x_sum =
          task.x_sums == nullptr ? 0 : task.x_sums[(m + t) * w.groups + run / piece.group];
      for (int v = 0; v < Pairs::kVectors; ++v) {
        AddGroup(w, integers[t][v].ToFloat(), x_sum, scratch.scales + cell + 16 * v,
                 scratch.offsets + cell + 16 * v, scratch.sums + (m + t) * kPanelColumns + 16 * v);
      }
    }
    cell += kPanelColumns;
  }
}

template <int kTokens>
__attribute__((noinline)) void MultiplyPieceOfGroup(const ScaledPiece& piece, int64_t m) {
  const ScaledTask& task = piece.task;
  Pairs::Sums integers[kTokens][Pairs::kVectors];
  MultiplyPairs<kTokens>(task.x + m * task.x_stride + piece.begin * kRowsOfRun, task.x_stride,
                         piece.scratch.panel, (piece.end - piece.begin) * kPairsOfRun, integers);
  for (int t = 0; t < kTokens; ++t) {
    int64_t* totals = piece.scratch.totals + (m + t) * kPanelColumns;
    for (int v = 0; v < Pairs::kVectors; ++v) {
      int32_t lanes[16];
      integers[t][v].Store(lanes);
      for (int c = 0; c < 16; ++c) totals[16 * v + c] += lanes[c];
    }
  }
}

// At the end of a group that was multiplied in pieces.
void AddTotals(const ScaledPiece& piece, int64_t group) {
  const K16Weight& w = piece.panel.w;
  const ScaledScratch& scratch = piece.scratch;
  for (int64_t m = 0; m < piece.task.rows; ++m) {
    const float x_sum = piece.task.x_sums == nullptr ? 0 : piece.task.x_sums[m * w.groups + group];
    for (int v = 0; v < Pairs::kVectors; ++v) {
      const int64_t at = m * kPanelColumns + 16 * v;
      float values[16];
      for (int c = 0; c < 16; ++c) values[c] = static_cast<float>(scratch.totals[at + c]);
      AddGroup(w, Vec::Load(values), x_sum, scratch.scales + 16 * v, scratch.offsets + 16 * v,
               scratch.sums + at);
    }
  }
  std::memset(scratch.totals, 0, piece.task.rows * kPanelColumns * sizeof(int64_t));
}

// y = sums * outer * x_scale + bias of one tile, of any of the tasks of integers. `sums`:
// [rows][8], `stride` floats apart. `x_scale`: [rows], or null for 1.
template <typename Task>
void StoreTile(const K16Weight& w, const Task& task, int64_t tile, const float* x_scale,
               const float* sums, int64_t stride) {
  const int64_t columns = w.n - tile * 8;
  const float* bias = task.bias == nullptr ? nullptr : task.bias + tile * 8;
  float outer[8], values[8];
  LoadOuter(w, tile, outer);
  for (int64_t m = 0; m < task.rows; ++m, sums += stride) {
    const float scale = x_scale == nullptr ? 1 : x_scale[m];
    for (int c = 0; c < 8; ++c) values[c] = sums[c] * outer[c] * scale;
    const int64_t index = m * task.y_stride + tile * 8;
    if (columns >= 8) {
      Store8Plus(task.y, task.y_type, index, values, bias);
      continue;
    }
    for (int64_t c = 0; c < columns; ++c) {
      Store1(task.y, task.y_type, index + c, bias == nullptr ? values[c] : values[c] + bias[c]);
    }
  }
}

template <typename Task>
void StoreScaled(const PanelOf& panel, const float* x_scale, const Task& task,
                 const ScaledScratch& scratch) {
  for (int t = 0; t < kPanelTiles && panel.first + t <= panel.last; ++t) {
    StoreTile(panel.w, task, panel.first + t, x_scale, scratch.sums + t * 8, kPanelColumns);
  }
}

template <typename Multiply>
void ForTokens(int64_t rows, Multiply multiply) {
  int64_t m = 0;
  for (; m + Pairs::kTokens <= rows; m += Pairs::kTokens) {
    multiply(m, Number<Pairs::kTokens>());
  }
  if (m < rows) WithCount<1, Pairs::kTokens>(rows - m, [&](auto n) { multiply(m, n); });
}

template <int kBits>
void ScaledPanel(const PanelOf& p, const ScaledTask& task, const ScaledScratch& scratch) {
  const K16Weight& w = p.w;
  const int64_t group = w.integers ? w.runs : w.runs_per_group;
  const bool whole = group <= kRunsOfPiece;  // whole groups in a piece
  const int64_t step = whole ? kRunsOfPiece / group * group : kRunsOfPiece;
  std::memset(scratch.sums, 0, task.rows * kPanelColumns * sizeof(float));
  if (!whole) std::memset(scratch.totals, 0, task.rows * kPanelColumns * sizeof(int64_t));
  ScaledPiece piece = {p, task, scratch, group};
  while (piece.begin < w.runs) {
    const int64_t border = whole ? w.runs : (piece.begin / group + 1) * group;
    const int64_t limit = border < w.runs ? border : w.runs;
    piece.end = piece.begin + step < limit ? piece.begin + step : limit;
    if (HasIntegerScales(w)) {
      DecodePanel<kBits, true>(p, piece.begin, piece.end, scratch.panel);
    } else {
      DecodePanel<kBits, false>(p, piece.begin, piece.end, scratch.panel);
    }
    if (whole) {
      LoadFactors(p, piece.begin / group, (piece.end - 1) / group, scratch);
      ForTokens(task.rows, [&](int64_t m, auto n) { MultiplyGroups<n.kValue>(piece, m); });
    } else {
      ForTokens(task.rows, [&](int64_t m, auto n) { MultiplyPieceOfGroup<n.kValue>(piece, m); });
      if (piece.end == limit) {
        LoadFactors(p, piece.begin / group, piece.begin / group, scratch);
        AddTotals(piece, piece.begin / group);
      }
    }
    piece.begin = piece.end;
  }
  StoreScaled(p, task.x_scale, task, scratch);
}

// Some body files want its parts alone.
[[maybe_unused]] void ScaledProduct(const K16Weight& w, const ScaledTask& task) {
  const ScaledScratch scratch(task.scratch);
  for (int64_t tile = task.tile_begin; tile < task.tile_end; tile += kPanelTiles) {
    const int64_t end = tile + kPanelTiles < task.tile_end ? tile + kPanelTiles : task.tile_end;
    const PanelOf panel = {w, tile, end - 1};
    if (w.bits == 8) {
      ScaledPanel<8>(panel, task, scratch);
    } else {
      WithCount<1, 4>(w.bits, [&](auto bits) { ScaledPanel<bits.kValue>(panel, task, scratch); });
    }
  }
}

}  // namespace
}  // namespace awqd::cpu
