// The product of many tokens of 16-bit activations as integers (block_integers.h), by panels of
// decoded weights (panel.h) and pairs of rows, as that of quantised activations (scaled_body.h).
// What differs is that a scale belongs to a block of a token, not to the token.
//
//   y[n] = sum over units of scale * (step * sum(q * (code - zero)))
//
// A unit is what one block and one group have in common: its sum is exact in INT32
// (128 * 32512 * 255 < 2^31). Real zeros are taken off as in scaled_body.h, by sums of x.
//
// Included by the body file for AVX-512 VNNI, behind scaled_body.h; everything has internal
// linkage.
#pragma once

#include "kernels/cpu/bodies/block_integers.h"
#include "kernels/cpu/bodies/scaled_body.h"

namespace awqd::cpu {
namespace {

// One token, of FP16 or BF16, whose rows lie in K as in the layout. False where it is not taken.
bool MakePairs(const K16Weight& w, const void* x, Element type, const TokenIntegers& out) {
  const int runs = static_cast<int>(RunsOfUnit(w));
  BlockIntegers integers;
  float* sums = out.sums;
  for (int64_t block = 0; block < w.blocks; ++block) {
    if (!integers.Make(w, x, type, block * kIntegerRows)) return false;
    auto* const pairs = static_cast<int16_t*>(out.values) + block * kIntegerRows;
    for (int i = 0; i < 8; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + 16 * i),
                          _mm512_cvtepi32_epi16(integers.q[i]));
    }
    out.steps[block] = integers.step;
    for (int run = 0; run < 8 && block * 8 + run < w.runs; run += runs) {
      *sums++ = integers.Sum(run, run + runs);
    }
  }
  return true;
}

// Units of runs [begin, end) of K, which the panel holds.
struct UnitsOfPanel {
  const PanelOf& panel;
  const PairTask& task;
  const ScaledScratch& scratch;
  int64_t unit = 8;  // runs
  int64_t begin = 0;
  int64_t end = 0;
};

// The scales and zeros of each unit's group.
void LoadUnitFactors(const UnitsOfPanel& u) {
  for (int64_t run = u.begin, at = 0; run < u.end; run += u.unit, at += kPanelColumns) {
    const int64_t group = run / u.panel.w.runs_per_group;
    ScaledScratch scratch = u.scratch;
    scratch.scales += at;
    scratch.offsets += at;
    LoadFactors(u.panel, group, group, scratch);
  }
}

template <int kTokens>
__attribute__((noinline)) void MultiplyUnits(const UnitsOfPanel& u, int64_t m) {
  const K16Weight& w = u.panel.w;
  const PairTask& task = u.task;
  const int64_t stride = w.blocks * kIntegerRows, units = UnitsOf(w);
  int64_t cell = 0;
  for (int64_t run = u.begin; run < u.end; run += u.unit, cell += kPanelColumns) {
    const int64_t runs = u.end - run < u.unit ? u.end - run : u.unit;
    Pairs integers[kTokens][Pairs::kVectors];
    MultiplyPairs<kTokens>(task.x + m * stride + run * kRowsOfRun, stride,
                           u.scratch.panel + (run - u.begin) * kPairsOfRun * kPanelColumns,
                           runs * kPairsOfRun, integers);
    for (int t = 0; t < kTokens; ++t) {
      const Vec::F step = Vec::Set(task.steps[(m + t) * w.blocks + run / 8]);
      const float x_sum = task.sums[(m + t) * units + run / u.unit];
      for (int v = 0; v < Pairs::kVectors; ++v) {
        AddGroup(w, Vec::Mul(integers[t][v].ToFloat(), step), x_sum,
                 u.scratch.scales + cell + 16 * v, u.scratch.offsets + cell + 16 * v,
                 u.scratch.sums + (m + t) * kPanelColumns + 16 * v);
      }
    }
  }
}

template <int kBits>
void PairPanel(const PanelOf& p, const PairTask& task, const ScaledScratch& scratch) {
  UnitsOfPanel units = {p, task, scratch, RunsOfUnit(p.w)};
  std::memset(scratch.sums, 0, task.rows * kPanelColumns * sizeof(float));
  for (int64_t begin = 0; begin < p.w.runs; begin += kRunsOfPiece) {
    units.begin = begin;
    units.end = begin + kRunsOfPiece < p.w.runs ? begin + kRunsOfPiece : p.w.runs;
    DecodePanel<kBits, false>(p, units.begin, units.end, scratch.panel);
    LoadUnitFactors(units);
    ForTokens(task.rows, [&](int64_t m, auto n) { MultiplyUnits<n.kValue>(units, m); });
  }
  StoreScaled(p, nullptr, task, scratch);
}

void PairProduct(const K16Weight& w, const PairTask& task) {
  const ScaledScratch scratch(task.scratch);
  for (int64_t tile = task.tile_begin; tile < task.tile_end; tile += kPanelTiles) {
    const int64_t end = tile + kPanelTiles < task.tile_end ? tile + kPanelTiles : task.tile_end;
    const PanelOf panel = {w, tile, end - 1};
    if (w.bits == 8) {
      PairPanel<8>(panel, task, scratch);
    } else {
      WithCount<1, 4>(w.bits, [&](auto bits) { PairPanel<bits.kValue>(panel, task, scratch); });
    }
  }
}

}  // namespace
}  // namespace awqd::cpu
