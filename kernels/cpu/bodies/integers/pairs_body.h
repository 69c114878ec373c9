// The product of many tokens of 16-bit activations as integers (int16_block.h), by panels of
// decoded weights (panel.h) and pairs of rows, as that of quantised activations (panel_product.h).
// What differs is that a scale belongs to a block of a token, not to the token.
//
//   y[n] = sum over blocks of scale * (step * sum(q * (code - zero)))
//
// The sum of a block is exact in INT32 (128 * 32512 * 255 < 2^31). Real zeros are taken off as in
// panel_product.h, by sums of x. Bits are those of column_product.h.
//
// Included by the body file for AVX-512 VNNI, behind panel_product.h; everything has internal
// linkage.
#pragma once

#include "kernels/cpu/bodies/integers/int16_block.h"
#include "kernels/cpu/bodies/integers/panel_product.h"

namespace awqd::cpu {
namespace {

// One token, of FP16 or BF16. False where it is not taken.
bool MakePairs(const K16Weight& w, const void* x, Element type, const TokenIntegers& out) {
  BlockIntegers integers;
  for (int64_t block = 0; block < w.blocks; ++block) {
    if (!integers.Make(w, x, type, block * kIntegerRows)) return false;
    integers.Store16(static_cast<int16_t*>(out.values) + block * kIntegerRows);
    out.steps[block] = integers.step;
    out.sums[block] = integers.Sum();
  }
  return true;
}

constexpr int64_t kRunsOfIntegers = kIntegerRows / kRowsOfRun;

// Runs [begin, end) of K, whole blocks but for the last, which the panel holds.
struct PairPiece {
  const PanelOf& panel;
  const StandInTask& task;
  const ScaledScratch& scratch;
  int64_t begin = 0;
  int64_t end = 0;

  // The scales and zeros of each block's group.
  void LoadFactorsOfBlocks() const {
    for (int64_t run = begin, at = 0; run < end; run += kRunsOfIntegers, at += kPanelColumns) {
      const int64_t group = run / panel.w.runs_per_group;
      ScaledScratch of_block = scratch;
      of_block.scales += at;
      of_block.offsets += at;
      LoadFactors(panel, group, group, of_block);
    }
  }
};

template <int kTokens>
__attribute__((noinline)) void MultiplyBlocks(const PairPiece& piece, int64_t m) {
  const K16Weight& w = piece.panel.w;
  const StandInTask& task = piece.task;
  const auto* const x = static_cast<const int16_t*>(task.values);
  const int64_t stride = w.blocks * kIntegerRows;
  int64_t cell = 0;
  for (int64_t run = piece.begin; run < piece.end; run += kRunsOfIntegers, cell += kPanelColumns) {
    const int64_t left = piece.end - run, runs = left < kRunsOfIntegers ? left : kRunsOfIntegers;
    Pairs integers[kTokens][Pairs::kVectors];
    MultiplyPairs<kTokens>(x + m * stride + run * kRowsOfRun, stride,
                           piece.scratch.panel + (run - piece.begin) * kPairsOfRun * kPanelColumns,
                           runs * kPairsOfRun, integers);
    for (int t = 0; t < kTokens; ++t) {
      const int64_t at = (m + t) * w.blocks + run / kRunsOfIntegers;
      const float step = task.steps[at], x_sum = step * static_cast<float>(task.sums[at]);
      for (int v = 0; v < Pairs::kVectors; ++v) {
        AddGroup(w, Vec::Mul(integers[t][v].ToFloat(), Vec::Set(step)), x_sum,
                 piece.scratch.scales + cell + 16 * v, piece.scratch.offsets + cell + 16 * v,
                 piece.scratch.sums + (m + t) * kPanelColumns + 16 * v);
      }
    }
  }
}

template <int kBits>
void PairPanel(const PanelOf& p, const StandInTask& task, const ScaledScratch& scratch) {
  PairPiece piece = {p, task, scratch};
  std::memset(scratch.sums, 0, task.rows * kPanelColumns * sizeof(float));
  for (int64_t begin = 0; begin < p.w.runs; begin += kRunsOfPiece) {
    piece.begin = begin;
    piece.end = begin + kRunsOfPiece < p.w.runs ? begin + kRunsOfPiece : p.w.runs;
    DecodePanel<kBits, false>(p, piece.begin, piece.end, scratch.panel);
    piece.LoadFactorsOfBlocks();
    ForTokens(task.rows, [&](int64_t m, auto n) { MultiplyBlocks<n.kValue>(piece, m); });
  }
  StoreScaled(p, nullptr, task, scratch);
}

void PairProduct(const K16Weight& w, const StandInTask& task) {
  const ScaledScratch scratch(task.scratch);
  for (int64_t tile = task.tile_begin; tile < task.tile_end; tile += kPanelTiles) {
    const int64_t end = tile + kPanelTiles < task.tile_end ? tile + kPanelTiles : task.tile_end;
    const PanelOf panel = {w, tile, end - 1};
    if (w.bits == 8) {
      PairPanel<8>(panel, task, scratch);
    } else {
      PairPanel<4>(panel, task, scratch);
    }
  }
}

}  // namespace
}  // namespace awqd::cpu
