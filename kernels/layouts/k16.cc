// Layout "k16", for schemes of up to 4 bits.
//
// Codes: [N/8 tiles][blocks][8 columns][16 words]. Nibble j of word i of a column's block b is the
// code of padded row 128 b + 16 j + i, so a shift by 4 j leaves 16 consecutive rows in the low
// nibbles of 16 lanes, and a table look-up that reads only 4 index bits needs no mask. A tile is
// one stream from its first block to its last.
// Groups are padded to a multiple of 16 rows with codes equal to their zero point: weights of 0.
// Scales: [N/8][K/g][8] as stored. Zeros: [N/8][K/g][8], one byte each (none when symmetric).
// README.md has a worked example.
#include "kernels/layouts/k16.h"

#include <algorithm>
#include <cstring>

#include "kernels/layouts/nibbles.h"

namespace awqd {
namespace {

std::string Refuses(const WeightShape& shape) {
  return CodeBits(shape.scheme.bits) > 4 ? "codes of more than 4 bits" : "";
}

LayoutExtent Extent(const WeightShape& shape) {
  const K16Shape k16(shape);
  const int64_t cells = shape.groups() * shape.n;
  LayoutExtent out;
  out.codes_bytes = shape.n * k16.blocks * K16Shape::kWordsPerBlock * 4;
  out.scales_bytes = cells * SizeOf(shape.scheme.scale_dtype);
  out.zeros_bytes = shape.scheme.zero_kind == ZeroKind::kInteger ? cells : 0;
  return out;
}

// Where a padded row comes from.
struct Source {
  int64_t group = 0;
  int64_t row = -1;  // of the weight, or -1 for padding
};

class RowMap {
 public:
  explicit RowMap(const WeightShape& shape)
      : group_size_(shape.scheme.group_size),
        padded_group_(K16Shape(shape).runs_per_group * K16Shape::kRun),
        groups_(shape.groups()) {}

  Source At(int64_t padded_row) const {
    Source out{padded_row / padded_group_, -1};
    const int64_t offset = padded_row % padded_group_;
    if (out.group < groups_ && offset < group_size_) out.row = out.group * group_size_ + offset;
    return out;
  }

 private:
  int64_t group_size_, padded_group_, groups_;
};

// The codes of 8 columns of one row as nibbles, from 2 or 4 bits each.
uint32_t LoadTileRow(const CanonicalWeight& w, int64_t row, int64_t tile) {
  const int bits = w.code_bits();
  uint32_t packed = 0;
  std::memcpy(&packed, w.codes.data() + row * w.row_bytes() + tile * bits, bits);
  if (bits == 4) return packed;
  uint32_t out = 0;
  for (int c = 0; c < 8; ++c) out |= (packed >> (2 * c) & 3u) << (4 * c);
  return out;
}

void StoreTileRow(CanonicalWeight* w, int64_t row, int64_t tile, uint32_t nibbles) {
  const int bits = w->code_bits();
  uint32_t packed = nibbles;
  if (bits == 2) {
    packed = 0;
    for (int c = 0; c < 8; ++c) packed |= (nibbles >> (4 * c) & 3u) << (2 * c);
  }
  std::memcpy(w->codes.data() + row * w->row_bytes() + tile * bits, &packed, bits);
}

uint32_t PaddingRow(const CanonicalWeight& w, int64_t group, int64_t tile) {
  if (group >= w.groups()) return 0;
  uint32_t out = 0;
  for (int c = 0; c < 8; ++c) {
    out |= static_cast<uint32_t>(w.Zero(group, tile * 8 + c) & 15) << (4 * c);
  }
  return out;
}

// Calls visit(sources of 8 words, tile, first word of the packed codes). Tiles some at a time: what
// is packed stays in the L1 cache until its lines are full, and neighbours share the lines of the
// canonical codes.
template <typename Visit>
void ForEachWordGroup(const WeightShape& shape, ColumnRange columns, Visit visit) {
  constexpr int64_t kTilesAtATime = 32;
  const K16Shape k16(shape);
  const RowMap map(shape);
  const int64_t end = columns.end / K16Shape::kTile;
  for (int64_t b = 0; b < k16.blocks; ++b) {
    for (int64_t t0 = columns.begin / K16Shape::kTile; t0 < end; t0 += kTilesAtATime) {
      for (int64_t i = 0; i < K16Shape::kWordsPerBlock; ++i) {
        Source sources[8];
        for (int64_t j = 0; j < 8; ++j) sources[j] = map.At(128 * b + 16 * j + i);
        for (int64_t t = t0; t < std::min(end, t0 + kTilesAtATime); ++t) {
          visit(sources, t, ((t * k16.blocks + b) * 8) * K16Shape::kWordsPerBlock + i);
        }
      }
    }
  }
}

// Copies [G][N] cells to [N/8][G][8], or back.
void PackCells(const uint8_t* in, const CanonicalWeight& w, ColumnRange columns, int64_t size,
               uint8_t* out) {
  for (int64_t g = 0; g < w.groups(); ++g) {
    for (int64_t t = columns.begin / 8; t < columns.end / 8; ++t) {
      std::memcpy(out + (t * w.groups() + g) * 8 * size, in + (g * w.n + t * 8) * size, 8 * size);
    }
  }
}

void UnpackCells(const uint8_t* in, int64_t groups, int64_t n, int64_t size, uint8_t* out) {
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t t = 0; t < n / 8; ++t) {
      std::memcpy(out + (g * n + t * 8) * size, in + (t * groups + g) * 8 * size, 8 * size);
    }
  }
}

void Pack(const CanonicalWeight& w, ColumnRange columns, uint8_t* out) {
  const WeightShape shape{w.k, w.n, w.scheme};
  const LayoutExtent extent = Extent(shape);
  ForEachWordGroup(shape, columns, [&](const Source* sources, int64_t tile, int64_t first) {
    uint32_t words[8];
    for (int j = 0; j < 8; ++j) {
      words[j] = sources[j].row >= 0 ? LoadTileRow(w, sources[j].row, tile)
                                     : PaddingRow(w, sources[j].group, tile);
    }
    TransposeNibbles(words);
    for (int c = 0; c < 8; ++c) {
      std::memcpy(out + (first + c * K16Shape::kWordsPerBlock) * 4, &words[c], 4);
    }
  });
  const int64_t size = SizeOf(w.scheme.scale_dtype);
  PackCells(w.scales.data(), w, columns, size, out + extent.scales_offset());
  if (!w.zeros.empty()) {
    PackCells(w.zeros.data(), w, columns, 1, out + extent.zeros_offset());
  }
}

void Unpack(const uint8_t* in, CanonicalWeight* w) {
  const WeightShape shape{w->k, w->n, w->scheme};
  const LayoutExtent extent = Extent(shape);
  ForEachWordGroup(shape, {0, w->n}, [&](const Source* sources, int64_t tile, int64_t first) {
    uint32_t words[8];
    for (int c = 0; c < 8; ++c) {
      std::memcpy(&words[c], in + (first + c * K16Shape::kWordsPerBlock) * 4, 4);
    }
    TransposeNibbles(words);
    for (int j = 0; j < 8; ++j) {
      if (sources[j].row >= 0) StoreTileRow(w, sources[j].row, tile, words[j]);
    }
  });
  const int64_t size = SizeOf(w->scheme.scale_dtype);
  UnpackCells(in + extent.scales_offset(), w->groups(), w->n, size, w->scales.data());
  if (!w->zeros.empty()) {
    UnpackCells(in + extent.zeros_offset(), w->groups(), w->n, 1, w->zeros.data());
  }
}

}  // namespace

const Layout kK16Layout = {"k16", Refuses, Extent, Pack, Unpack};

}  // namespace awqd
