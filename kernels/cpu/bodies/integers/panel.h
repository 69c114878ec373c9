// Packed panels: tiles side by side, decoded some rows of K at a time, to pairs of 16-bit integers
// less their zeros. A lane has rows 2 i and 2 i + 1 of a column. Everything has internal linkage.
#pragma once

#include "kernels/cpu/bodies/codes.h"

namespace awqd::cpu {
namespace {

constexpr int64_t kRunRows = 16, kRunPairs = 8;
constexpr int64_t kPieceRuns = 32;  // that are decoded at a time: 32 KiB for 32 columns
constexpr int kPanelColumns = 16 * IntVec::kVectors;
constexpr int kPanelTiles = 2 * IntVec::kVectors;

// The tiles that are decoded together. Past the last of the task they repeat it: what is computed
// twice is not stored twice.
struct PanelTiles {
  const K16Weight& w;
  int64_t first = 0;
  int64_t last = 0;

  int64_t Tile(int t) const { return first + t < last ? first + t : last; }
};

inline bool HasIntegerScales(const K16Weight& w) { return w.integers && w.scales != nullptr; }

struct GroupCells {
  IntVec zeros[IntVec::kVectors], scales[IntVec::kVectors];
};

// Bytes [tiles][groups][8] as pairs of equals.
void LoadBytes(const PanelTiles& p, const uint8_t* bytes, int64_t group, IntVec* out) {
  for (int v = 0; v < IntVec::kVectors; ++v) {
    const auto at = [&](int t) { return bytes + (p.Tile(2 * v + t) * p.w.groups + group) * 8; };
    const IntVec lanes = IntVec::WidenBytes(at(0), at(1));
    out[v] = lanes | lanes << 16;
  }
}

void LoadGroupCells(const PanelTiles& p, int64_t group, GroupCells* out) {
  const K16Weight& w = p.w;
  if (w.zeros != nullptr && w.zero_type == Element::kByte) {
    LoadBytes(p, w.zeros, group, out->zeros);
  } else {
    const auto zero = static_cast<uint32_t>(w.zero);
    for (IntVec& zeros : out->zeros) zeros = IntVec::Set(zero | zero << 16);
  }
  if (!HasIntegerScales(w)) return;
  LoadBytes(p, w.scales, group, out->scales);
  const IntVec sign = IntVec::Set(0x00800080);
  for (IntVec& scales : out->scales) scales = (scales ^ sign).Subtract16(sign);
}

// 16 words of 8 columns, with their codes: word i of column c at words[i * kPanelColumns + c].
template <int kBits>
void LoadWords(const K16Weight& w, const uint8_t* block, int half, uint32_t* words) {
  if constexpr (kBits == 4) {
    TransposeTile(reinterpret_cast<const uint32_t*>(block), words, kPanelColumns);
  } else {
    uint32_t lanes[8 * 16];
    for (int c = 0; c < 8; ++c) {
      const uint8_t* column = block + c * w.block_bytes;
      if constexpr (kBits == 8) {
        std::memcpy(lanes + c * 16, column + half * 64, 64);
      } else {
        Vec::WidenLanes(column, kBits, lanes + c * 16);
      }
    }
    TransposeTile(lanes, words, kPanelColumns);
  }
}

// Calls emit(j, i, codes) with the codes of rows 2 i and 2 i + 1 of run j, of 16 columns.
//
// Codes of 8 bits: words are half a block, word i has rows 4 i .. 4 i + 3. Otherwise they are a
// block: word i has the codes of rows 16 j + i at bit kBits * j, and two neighbouring words are
// made pairs for four runs at a time, because 16 bits hold four codes.
template <int kBits, typename Emit>
AWQD_ALWAYS_INLINE inline void ForPairs(const uint32_t* words, Emit emit) {
  for (int i = 0; i < 8; ++i) {
    const IntVec a = IntVec::LoadTransposed(words + 2 * i * kPanelColumns);
    const IntVec b = IntVec::LoadTransposed(words + (2 * i + 1) * kPanelColumns);
    if constexpr (kBits == 8) {
      const IntVec sign = IntVec::Set(0x80808080);
      const int run = i / 2, pair = i % 2 * 4;
      emit(run, pair, (a ^ sign).LowBytes());
      emit(run, pair + 1, (a ^ sign).HighBytes());
      emit(run, pair + 2, (b ^ sign).LowBytes());
      emit(run, pair + 3, (b ^ sign).HighBytes());
    } else {
      constexpr uint32_t kMask = (1u << kBits) - 1;
      const IntVec lower = IntVec::Set(0xffff), mask = IntVec::Set(kMask | kMask << 16);
      const IntVec first = (a & lower) | b << 16;
      const IntVec second = (a >> 4 * kBits & lower) | (b >> 4 * kBits) << 16;
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        emit(j, i, first >> kBits * j & mask);
        emit(j + 4, i, second >> kBits * j & mask);
      }
    }
  }
}

inline const uint8_t* BlockOf(const K16Weight& w, int64_t tile, int64_t block) {
  return w.codes + (tile * w.blocks + block) * 8 * w.block_bytes;
}

// A tile is read a block at a time, in turn with its neighbours, which is too little at once for
// hardware prefetchers: it is fetched some blocks before, and so is the panel that comes next.
AWQD_ALWAYS_INLINE inline void PrefetchAhead(const K16Weight& w, int64_t tile, int64_t block) {
  constexpr int64_t kAhead = 8;
  const bool here = block + kAhead < w.blocks;
  const uint8_t* at = here ? BlockOf(w, tile, block + kAhead)
                           : BlockOf(w, tile + kPanelTiles, block + kAhead - w.blocks);
  for (int64_t line = 0; line < 8 * w.block_bytes; line += 64) {
    __builtin_prefetch(at + line, kRead, kL2Cache);
  }
}

// Runs [begin, end) to panel[pairs of rows][kPanelColumns].
template <int kBits, bool kScales>
void DecodePanel(const PanelTiles& p, int64_t begin, int64_t end, uint32_t* panel) {
  constexpr int kRuns = kBits == 8 ? 4 : 8;  // whose words are loaded together
  const K16Weight& w = p.w;
  alignas(64) uint32_t words[16 * kPanelColumns];
  GroupCells cells[kRuns], of_group;
  int64_t group = begin / w.runs_per_group, left = (group + 1) * w.runs_per_group - begin;
  if (left < w.runs_per_group) LoadGroupCells(p, group, &of_group);
  for (int64_t first = begin / kRuns * kRuns; first < end; first += kRuns) {
    const int from = static_cast<int>(first < begin ? begin - first : 0);
    const int to = static_cast<int>(end - first < kRuns ? end - first : kRuns);
    for (int t = 0; t < kPanelTiles; ++t) {
      const uint8_t* codes = BlockOf(w, p.Tile(t), first / 8);
      if (kRuns == 8 || first % 8 == 0) PrefetchAhead(w, p.Tile(t), first / 8);
      LoadWords<kBits>(w, codes, static_cast<int>(first / kRuns % 2), words + t * 8);
    }
    for (int j = from; j < to; ++j) {
      if (left == w.runs_per_group) LoadGroupCells(p, group, &of_group);
      cells[j] = of_group;
      if (--left == 0) left = w.runs_per_group, ++group;
    }
    for (int v = 0; v < IntVec::kVectors; ++v) {
      uint32_t* const out = panel + (first - begin) * kRunPairs * kPanelColumns + 16 * v;
      ForPairs<kBits>(words + 16 * v, [&](int j, int i, IntVec codes) AWQD_ALWAYS_INLINE {
        if (j < from || j >= to) return;
        IntVec weights = codes.Subtract16(cells[j].zeros[v]);
        if constexpr (kScales) weights = weights.Multiply16(cells[j].scales[v]);
        weights.Store(out + (j * kRunPairs + i) * kPanelColumns);
      });
    }
  }
}

}  // namespace
}  // namespace awqd::cpu
