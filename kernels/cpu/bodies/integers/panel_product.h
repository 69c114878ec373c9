// Products of integers from packed panels (panel.h), which hold two rows of a column in each lane,
// by the instruction that multiplies two pairs of 16-bit integers and adds both products. A lane's
// sum is a column's, so nothing is folded.
//
// A span is the rows of K whose integers are summed before they are scaled: a group for INT8
// activations, a block of 128 rows for FP16 and BF16 activations, which have a step for each block.
// Sums of a span are exact. INT32 holds a piece, 512 rows, of the largest weights and INT8
// (128 * 128 * 255 * 512 < 2^31), and a block of INT16 (128 * 32512 * 255 < 2^31); INT64 holds the
// sums of longer groups. Sums of spans are scaled and added in FP32, in their order:
//
//   zeros           a span adds
//   integers        s * sum(q * (code - zero))
//   real, before    s * (sum(q * code) - zero * sum(q))
//   real, after     s * sum(q * code) - zero * sum(q)
//
// where sums of INT16 are multiplied by their step before. INT8 scales beside integer zeros are
// multiplied into the 16-bit integers, which hold 128 * 255. Then, as without any scale, the
// weights are integers, and all of K is one span.
//
// Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/integers/panel.h"

namespace awqd::cpu {
namespace {

constexpr int64_t kBlockRuns = kBlockRows / kRunRows;

// --- Prologue: INT8 to 16 bits, the groups padded with zeros as the layout has them ---

[[maybe_unused]] bool WidenInt8(const K16Weight& w, const void* x, Element,
                                const IntegerToken& out) {
  const auto* const from = static_cast<const int8_t*>(x);
  auto* const q = static_cast<int16_t*>(out.q);
  std::memset(q, 0, w.blocks * kBlockRows * sizeof(int16_t));
  for (int64_t group = 0; group < w.groups; ++group) {
    const int64_t begin = group * w.group_size;
    const int64_t end = begin + w.group_size < w.k ? begin + w.group_size : w.k;
    int16_t* const to = q + group * w.runs_per_group * kRunRows;
    int32_t sum = 0;
    for (int64_t k = begin; k < end; ++k) {
      to[k - begin] = from[k];
      sum += from[k];
    }
    out.sums[group] = sum;
  }
  return true;
}

// --- Epilogue ---

// Where a thread keeps the tiles that it multiplies. 64-byte aligned throughout.
struct PanelScratch {
  static constexpr int64_t kPanel = kPieceRuns * kRunPairs * kPanelColumns;
  static constexpr int64_t kSums = kMaxIntegerRows * kPanelColumns;
  static constexpr int64_t kBytes = 4 * (kPanel + 3 * kSums + 2 * kPieceRuns * kPanelColumns);

  uint32_t* panel;  // [pairs of rows of the piece][kPanelColumns]
  int64_t* totals;  // [rows][kPanelColumns]: of a span that is longer than a piece
  float* sums;      // [rows][kPanelColumns]
  float* scales;    // [spans of the piece][kPanelColumns]
  float* offsets;   // likewise: real zeros, negated

  explicit PanelScratch(void* memory)
      : panel(static_cast<uint32_t*>(memory)),
        totals(reinterpret_cast<int64_t*>(panel + kPanel)),
        sums(reinterpret_cast<float*>(totals + kSums)),
        scales(sums + kSums),
        offsets(scales + kPieceRuns * kPanelColumns) {}
};

// Loads the scales that multiply the sums of a span of `group`, and real zeros, to `cell`.
void LoadFactors(const PanelTiles& p, int64_t group, int64_t cell, const PanelScratch& scratch) {
  const K16Weight& w = p.w;
  for (int t = 0; t < kPanelTiles; ++t) {
    const int64_t at = cell + t * 8, first = (p.Tile(t) * w.groups + group) * 8;
    LoadScales(w, first, scratch.scales + at);
    for (int c = 0; w.integers && c < 8; ++c) scratch.scales[at + c] = 1;
    if (HasIntegerZeros(w)) continue;
    LoadZeros(w, first, scratch.offsets + at);
    for (int c = 0; c < 8; ++c) scratch.offsets[at + c] = -scratch.offsets[at + c];
  }
}

// How a sum of q * code gets rid of zeros, where codes still have them.
enum class ZerosOfSums : uint8_t {
  kNone,      // it has none left
  kIntegers,  // in integers
  kBefore,    // in floats, before it is scaled
  kAfter,     // in floats, after
};
inline ZerosOfSums RealZeros(const K16Weight& w) {
  if (HasIntegerZeros(w)) return ZerosOfSums::kNone;
  return w.zero_after ? ZerosOfSums::kAfter : ZerosOfSums::kBefore;
}

// act(Constant<zeros>): loops over sums are compiled for each kind, without a branch for each sum.
template <typename Act>
AWQD_ALWAYS_INLINE inline void WithZeros(ZerosOfSums zeros, Act act) {
  if (zeros == ZerosOfSums::kNone) return act(Constant<ZerosOfSums::kNone>());
  if (zeros == ZerosOfSums::kBefore) return act(Constant<ZerosOfSums::kBefore>());
  act(Constant<ZerosOfSums::kAfter>());
}

// sum + what a span adds. V: Vec, or what has 8 columns (byte_dot.h). `x_sum`: of its x.
template <typename V>
AWQD_ALWAYS_INLINE inline typename V::F AddSpan(ZerosOfSums zeros, typename V::F value,
                                                typename V::F x_sum, typename V::F scale,
                                                typename V::F offset, typename V::F sum) {
  if (zeros == ZerosOfSums::kBefore) value = V::Fma(offset, x_sum, value);
  sum = V::Fma(value, scale, sum);
  return zeros == ZerosOfSums::kAfter ? V::Fma(offset, x_sum, sum) : sum;
}

// The same for 16 columns of a panel, whose factors are at `cell`.
AWQD_ALWAYS_INLINE inline void AddPanelSpan(ZerosOfSums zeros, const PanelScratch& scratch,
                                            Vec::F value, float x_sum, int64_t cell, float* sums) {
  Vec::Store(sums, AddSpan<Vec>(zeros, value, Vec::Set(x_sum), Vec::Load(scratch.scales + cell),
                                Vec::Load(scratch.offsets + cell), Vec::Load(sums)));
}

// y = values + bias of 8 columns of a token.
inline void StoreToken(const K16Weight& w, const IntegerTask& task, int64_t tile, int64_t m,
                       const float* values) {
  const int64_t columns = w.n - tile * 8, index = m * task.y_stride + tile * 8;
  const float* const bias = task.bias == nullptr ? nullptr : task.bias + tile * 8;
  if (columns >= 8) return Store8Plus(task.y, task.y_type, index, values, bias);
  for (int64_t c = 0; c < columns; ++c) {
    Store1(task.y, task.y_type, index + c, bias == nullptr ? values[c] : values[c] + bias[c]);
  }
}

// y = sums * outer * x_scale + bias of one tile. `sums`: [rows][8], `stride` floats apart.
void StoreTile(const K16Weight& w, const IntegerTask& task, int64_t tile, const float* sums,
               int64_t stride) {
  float outer[8], values[8];
  LoadOuter(w, tile, outer);
  for (int64_t m = 0; m < task.rows; ++m, sums += stride) {
    const float scale = task.x_scale == nullptr ? 1 : task.x_scale[m];
    for (int c = 0; c < 8; ++c) values[c] = sums[c] * outer[c] * scale;
    StoreToken(w, task, tile, m, values);
  }
}

void StorePanel(const PanelTiles& p, const IntegerTask& task, const PanelScratch& scratch) {
  for (int t = 0; t < kPanelTiles && p.first + t <= p.last; ++t) {
    StoreTile(p.w, task, p.first + t, scratch.sums + t * 8, kPanelColumns);
  }
}

// --- Multiplying ---

// Calls multiply(first token, Number<tokens>) for all of them.
template <typename Multiply>
void ForTokens(int64_t rows, Multiply multiply) {
  int64_t m = 0;
  for (; m + IntVec::kTokens <= rows; m += IntVec::kTokens) multiply(m, Number<IntVec::kTokens>());
  if (m < rows) WithCount<1, IntVec::kTokens>(rows - m, [&](auto n) { multiply(m, n); });
}

// Calls multiply(panel) for the tiles of the task, kPanelTiles at a time.
template <typename Multiply>
void ForPanels(const K16Weight& w, const IntegerTask& task, Multiply multiply) {
  for (int64_t tile = task.tile_begin; tile < task.tile_end; tile += kPanelTiles) {
    const int64_t end = tile + kPanelTiles < task.tile_end ? tile + kPanelTiles : task.tile_end;
    multiply(PanelTiles{w, tile, end - 1});
  }
}

// Runs [begin, end) of K, which the panel holds: whole spans or a piece of one.
struct PanelPiece {
  const PanelTiles& tiles;
  const IntegerTask& task;
  const PanelScratch& scratch;
  int64_t span = 0;  // runs
  int64_t begin = 0;
  int64_t end = 0;
};

// Sums the products of runs [run, run + runs) and kTokens tokens from m on.
template <int kTokens>
AWQD_ALWAYS_INLINE inline void MultiplyRuns(const PanelPiece& piece, int64_t m, int64_t run,
                                            int64_t runs,
                                            IntSums (&sums)[kTokens][IntVec::kVectors]) {
  const int64_t stride = piece.tiles.w.blocks * kBlockRows;
  const int16_t* x = static_cast<const int16_t*>(piece.task.q) + m * stride + run * kRunRows;
  const uint32_t* panel = piece.scratch.panel + (run - piece.begin) * kRunPairs * kPanelColumns;
  for (int64_t i = 0; i < runs * kRunPairs; ++i, panel += kPanelColumns) {
    IntVec weights[IntVec::kVectors];
    Times<IntVec::kVectors>([&](auto v)
                                AWQD_ALWAYS_INLINE { weights[v] = IntVec::Load(panel + 16 * v); });
    Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
      uint32_t pair;
      std::memcpy(&pair, x + t * stride + 2 * i, sizeof(pair));
      const IntVec both = IntVec::Set(pair);
      Times<IntVec::kVectors>([&](auto v)
                                  AWQD_ALWAYS_INLINE { sums[t][v].AddProducts(both, weights[v]); });
    });
  }
}

// Whole spans. kSteps: of FP16 and BF16 activations.
template <bool kSteps, int kTokens>
__attribute__((noinline)) void MultiplySpans(const PanelPiece& piece, int64_t m) {
  const K16Weight& w = piece.tiles.w;
  const IntegerTask& task = piece.task;
  const PanelScratch scratch = piece.scratch;
  const int64_t spans = kSteps ? w.blocks : w.groups;
  float* const y = piece.scratch.sums + m * kPanelColumns;
  int64_t span = m * spans + piece.begin / piece.span, cell = 0;
  for (int64_t run = piece.begin; run < piece.end; run += piece.span, ++span) {
    const int64_t left = piece.end - run, runs = left < piece.span ? left : piece.span;
    IntSums integers[kTokens][IntVec::kVectors];
    MultiplyRuns<kTokens>(piece, m, run, runs, integers);
    WithZeros(RealZeros(w), [&](auto zeros) AWQD_ALWAYS_INLINE {
      Times<kTokens>([&](auto t) AWQD_ALWAYS_INLINE {
        const float step = kSteps ? task.steps[span + t * spans] : 1;
        auto x_sum = static_cast<float>(task.sums[span + t * spans]);
        if constexpr (kSteps) x_sum *= step;
        Times<IntVec::kVectors>([&](auto v) AWQD_ALWAYS_INLINE {
          Vec::F value = integers[t][v].ToFloat();
          if constexpr (kSteps) value = Vec::Mul(value, Vec::Set(step));
          AddPanelSpan(zeros, scratch, value, x_sum, cell + 16 * v, y + t * kPanelColumns + 16 * v);
        });
      });
    });
    cell += kPanelColumns;
  }
}

// A piece of a span that is longer.
template <int kTokens>
__attribute__((noinline)) void MultiplyPieceOfSpan(const PanelPiece& piece, int64_t m) {
  IntSums integers[kTokens][IntVec::kVectors];
  MultiplyRuns<kTokens>(piece, m, piece.begin, piece.end - piece.begin, integers);
  for (int t = 0; t < kTokens; ++t) {
    int64_t* totals = piece.scratch.totals + (m + t) * kPanelColumns;
    for (int v = 0; v < IntVec::kVectors; ++v) {
      int32_t lanes[16];
      integers[t][v].Store(lanes);
      for (int c = 0; c < 16; ++c) totals[16 * v + c] += lanes[c];
    }
  }
}

// At the end of a span that was multiplied in pieces.
void AddTotals(const PanelPiece& piece, int64_t group) {
  const K16Weight& w = piece.tiles.w;
  for (int64_t m = 0; m < piece.task.rows; ++m) {
    const auto x_sum = static_cast<float>(piece.task.sums[m * w.groups + group]);
    for (int64_t at = m * kPanelColumns, v = 0; v < kPanelColumns; v += 16) {
      float values[16];
      for (int c = 0; c < 16; ++c) {
        values[c] = static_cast<float>(piece.scratch.totals[at + v + c]);
      }
      AddPanelSpan(RealZeros(w), piece.scratch, Vec::Load(values), x_sum, v,
                   piece.scratch.sums + at + v);
    }
  }
  std::memset(piece.scratch.totals, 0, piece.task.rows * kPanelColumns * sizeof(int64_t));
}

template <int kBits, bool kSteps>
void MultiplyPanel(const PanelTiles& p, const IntegerTask& task, const PanelScratch& scratch) {
  const K16Weight& w = p.w;
  PanelPiece piece = {p, task, scratch};
  piece.span = kSteps ? kBlockRuns : w.integers ? w.runs : w.runs_per_group;
  const bool whole = piece.span <= kPieceRuns;  // whole spans in a piece
  const int64_t step = whole ? kPieceRuns / piece.span * piece.span : kPieceRuns;
  std::memset(scratch.sums, 0, task.rows * kPanelColumns * sizeof(float));
  if (!whole) std::memset(scratch.totals, 0, task.rows * kPanelColumns * sizeof(int64_t));
  for (; piece.begin < w.runs; piece.begin = piece.end) {
    const int64_t border = whole ? w.runs : (piece.begin / piece.span + 1) * piece.span;
    const int64_t limit = border < w.runs ? border : w.runs;
    piece.end = piece.begin + step < limit ? piece.begin + step : limit;
    if (!kSteps && HasIntegerScales(w)) {
      DecodePanel<kBits, true>(p, piece.begin, piece.end, scratch.panel);
    } else {
      DecodePanel<kBits, false>(p, piece.begin, piece.end, scratch.panel);
    }
    if (whole) {
      for (int64_t run = piece.begin, cell = 0; run < piece.end; run += piece.span) {
        LoadFactors(p, run / w.runs_per_group, cell, scratch);
        cell += kPanelColumns;
      }
      ForTokens(task.rows, [&](int64_t m, auto n) { MultiplySpans<kSteps, n.kValue>(piece, m); });
    } else {
      ForTokens(task.rows, [&](int64_t m, auto n) { MultiplyPieceOfSpan<n.kValue>(piece, m); });
      if (piece.end == limit) {
        const int64_t group = piece.begin / piece.span;
        LoadFactors(p, group, 0, scratch);
        AddTotals(piece, group);
      }
    }
  }
  StorePanel(p, task, scratch);
}

// Calls multiply(Number<bits>) for the width that codes take.
template <typename Multiply>
void WithBits(const K16Weight& w, Multiply multiply) {
  if (w.bits == 8) return multiply(Number<8>());
  WithCount<1, 4>(w.bits, multiply);
}

[[maybe_unused]] void Int8PanelProduct(const K16Weight& w, const IntegerTask& task) {
  const PanelScratch scratch(task.scratch);
  WithBits(w, [&](auto bits) {
    ForPanels(w, task,
              [&](const PanelTiles& p) { MultiplyPanel<bits.kValue, false>(p, task, scratch); });
  });
}

// Codes of 4 or 8 bits, groups of whole blocks.
[[maybe_unused]] void Int16PanelProduct(const K16Weight& w, const IntegerTask& task) {
  const PanelScratch scratch(task.scratch);
  ForPanels(w, task, [&](const PanelTiles& p) {
    if (w.bits == 8) return MultiplyPanel<8, true>(p, task, scratch);
    MultiplyPanel<4, true>(p, task, scratch);
  });
}

// y = q @ (code - zero), exact in INT32.
[[maybe_unused]] void Int32PanelProduct(const K16Weight& w, const IntegerTask& task) {
  const PanelScratch scratch(task.scratch);
  const auto multiply = [&](const PanelTiles& p, auto bits) {
    std::memset(scratch.totals, 0, task.rows * kPanelColumns * sizeof(int64_t));
    PanelPiece piece = {p, task, scratch};
    for (; piece.begin < w.runs; piece.begin = piece.end) {
      piece.end = piece.begin + kPieceRuns < w.runs ? piece.begin + kPieceRuns : w.runs;
      DecodePanel<bits.kValue, false>(p, piece.begin, piece.end, scratch.panel);
      ForTokens(task.rows, [&](int64_t m, auto n) { MultiplyPieceOfSpan<n.kValue>(piece, m); });
    }
    const int64_t begin = p.first * 8, end = (p.last + 1) * 8 < w.n ? (p.last + 1) * 8 : w.n;
    for (int64_t m = 0; m < task.rows; ++m) {
      int32_t* const y = static_cast<int32_t*>(task.y) + m * task.y_stride;
      const int64_t* const totals = scratch.totals + m * kPanelColumns;
      for (int64_t n = begin; n < end; ++n) y[n] = static_cast<int32_t>(totals[n - begin]);
    }
  };
  WithBits(w,
           [&](auto bits) { ForPanels(w, task, [&](const PanelTiles& p) { multiply(p, bits); }); });
}

// An entry of a body's tables.
constexpr IntegerProduct kInt8Panels = {
    .prologue = WidenInt8, .product = Int8PanelProduct, .token_bytes = 2 * kBlockRows};

}  // namespace
}  // namespace awqd::cpu
