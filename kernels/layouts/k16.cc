// Layout "k16": any weight but one with several groups of fewer than 8 rows.
//
// Codes: [N/8 tiles][blocks][8 columns][a block]. Block b holds rows 128 b .. 128 b + 127 of a
// padded column, as 16 lanes. Lane i has the rows 16 j + i, j = 0..7.
//
//   bits     a lane's codes              where the lane lies in its block
//   4        32 bits, row j at bit 4 j   word i
//   2        16 bits, row j at bit 2 j   half word i
//   1         8 bits, row j at bit j     byte i
//   3        24 bits, row j at bit 3 j   lower 16 as half word i, upper 8 as byte 32 + i
//   8        8 bits for each row         row j is byte 16 j + i: rows follow each other
//
// Lanes shifted right by j times `bits` have the codes of 16 consecutive rows in their low bits.
// Codes of 5 to 8 bits take 8. Integers of that width have their upper bit flipped: read as signed,
// they are the code less 128.
//
// Groups are padded to a multiple of 16 rows with the codes nearest to their zero, columns with
// scales and zeros of 0. Scales and zeros are [N/8][groups][8] as stored, one for each column even
// if columns share them.
//
// Worked places, for a weight of [256, 128] with FP16 scales and stored zeros, groups of 128 rows.
// Bits `part bits` of the code, scale or zero of element (k, n) begin at bit `bit` of byte `byte`
// of a section. tests/kernels/layout_specification_test.cc compares these lines with packed bytes.
//
//   bits    k    n  part   part bits  section  byte  bit
//      4    3    2  code         0-3  codes     140    0
//      4   19    2  code         0-3  codes     140    4
//      4  115    2  code         0-3  codes     143    4
//      4  131   10  code         0-3  codes    1676    0
//      3    3    2  code         0-2  codes     102    0
//      3   83    2  code         0-0  codes     103    7
//      3   83    2  code         1-2  codes     131    0
//      2   19    2  code         0-1  codes      70    2
//      1   19    2  code         0-0  codes      35    1
//      8    5    2  code         0-7  codes     261    0
//      4  130    5  scale       0-15  scales     26    0
//      4  130    5  zero         0-3  zeros      13    0
#include "kernels/layouts/k16.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/nibbles.h"
#include "kernels/base/stream.h"

namespace awqd {
namespace {

// Groups are padded to 16 rows, so smaller groups would more than double the weight.
constexpr int64_t kLeastGroup = 8;

std::string Refuses(const WeightShape& shape) {
  if (shape.scheme.rows_of_code() > 1) return "holds codes of single elements";
  if (shape.groups() == 1 || shape.group_rows() >= kLeastGroup) return "";
  return "holds groups of 8 rows at least";
}

void AddSections(const WeightShape& shape, Sections* sections) {
  const QuantizationScheme& d = shape.scheme;
  const K16Shape k16(shape);
  const int64_t cells = k16.tiles * k16.groups * K16Shape::kTile;
  sections->Add(Part::kCodes, k16.tiles * k16.blocks * k16.tile_block_bytes());
  sections->Add(Part::kScales, cells * d.scale_bytes());
  sections->Add(Part::kZeros, cells * d.zero_bytes());
}

// The origin of a padded row.
struct Source {
  int64_t group = 0;
  int64_t row = -1;  // row of the weight; -1: padding
};

Source SourceOf(const WeightShape& shape, const K16Shape& k16, int64_t padded_row) {
  const int64_t padded_group = k16.runs_per_group * K16Shape::kRun;
  Source out{padded_row / padded_group, -1};
  const int64_t offset = padded_row % padded_group;
  const int64_t row = out.group * shape.group_rows() + offset;
  if (out.group < k16.groups && offset < shape.group_rows() && row < shape.k) out.row = row;
  return out;
}

// --- Codes: eight rows of eight columns at a time, a byte each ---

// A mask of the lower `field` bits of every `place` bits.
constexpr uint64_t Fields(int field, int place) {
  return ~uint64_t{0} / ((uint64_t{1} << place) - 1) * ((uint64_t{1} << field) - 1);
}

// Converts eight codes of 1, 2, 3, 4 or 8 bits, side by side, to bytes and back: by halves,
// quarters and single codes.
uint64_t ToBytes(uint64_t codes, int bits) {
  codes = (codes | codes << (32 - 4 * bits)) & Fields(4 * bits, 32);
  codes = (codes | codes << (16 - 2 * bits)) & Fields(2 * bits, 16);
  return (codes | codes << (8 - bits)) & Fields(bits, 8);
}

uint64_t FromBytes(uint64_t bytes, int bits) {
  bytes &= Fields(bits, 8);
  bytes = (bytes | bytes >> (8 - bits)) & Fields(2 * bits, 16);
  bytes = (bytes | bytes >> (16 - 2 * bits)) & Fields(4 * bits, 32);
  if (bits == 8) return bytes;
  return (bytes | bytes >> (32 - 4 * bits)) & ((uint64_t{1} << 8 * bits) - 1);
}

// Writes 8 columns of `bits` each, or the rest of a row.
void StoreTileRow(HostWeight* w, int64_t row, int64_t tile, uint64_t packed) {
  const int64_t columns = std::min<int64_t>(8, w->n - tile * 8);
  std::memcpy(w->codes.data() + row * w->row_bytes() + tile * w->code_bits(), &packed,
              CeilDiv(columns * w->code_bits(), 8));
}

// The code nearest to the zero of a group and column, so that with an integer zero the weight is 0
// or the least value.
int PaddingCode(const HostWeight& w, int64_t group, int64_t col) {
  const QuantizationScheme& d = w.scheme;
  if (!d.is_integer() || d.real_zeros() || group >= w.groups() || col >= w.n) return 0;
  return std::min(w.Zero(group, col), (1 << d.bits) - 1);
}

uint64_t PaddingRow(const HostWeight& w, int64_t group, int64_t tile) {
  uint64_t out = 0;
  for (int c = 0; c < 8; ++c) {
    out |= static_cast<uint64_t>(PaddingCode(w, group, tile * 8 + c)) << (8 * c);
  }
  return out;
}

// Stores a lane's 8 codes, side by side, in the parts of the table above.
void StoreLane(uint64_t lane, int bits, int64_t i, uint8_t* block) {
  if (bits == 8) {
    for (int j = 0; j < 8; ++j) block[16 * j + i] = static_cast<uint8_t>(lane >> (8 * j));
  } else if (bits == 3) {
    std::memcpy(block + 2 * i, &lane, 2);
    block[32 + i] = static_cast<uint8_t>(lane >> 16);
  } else {
    for (int b = 0; b < bits; ++b) block[bits * i + b] = static_cast<uint8_t>(lane >> (8 * b));
  }
}

uint64_t LoadLane(const uint8_t* block, int bits, int64_t i) {
  uint64_t lane = 0;
  if (bits == 8) {
    for (int j = 0; j < 8; ++j) lane |= static_cast<uint64_t>(block[16 * j + i]) << (8 * j);
  } else if (bits == 3) {
    std::memcpy(&lane, block + 2 * i, 2);
    lane |= static_cast<uint64_t>(block[32 + i]) << 16;
  } else {
    std::memcpy(&lane, block + bits * i, bits);
  }
  return ToBytes(lane, bits);
}

// The bits in which stored codes differ from a weight's: integers of 8 bits are stored as if
// signed.
uint64_t Flip(const QuantizationScheme& d, int bits) {
  return d.is_integer() && bits == 8 ? 0x8080808080808080u : 0;
}

// Calls visit(block, first tile, tile behind the last) for some tiles at a time. Packed bytes then
// stay in the L1 cache until their lines are full, and neighbours share the lines of the codes.
template <typename Visit>
void ForEachTiles(const K16Shape& k16, ColumnRange columns, Visit visit) {
  constexpr int64_t kTilesAtATime = 32;
  const int64_t end = CeilDiv(columns.end, K16Shape::kTile);
  for (int64_t b = 0; b < k16.blocks; ++b) {
    for (int64_t t0 = columns.begin / K16Shape::kTile; t0 < end; t0 += kTilesAtATime) {
      visit(b, t0, std::min(end, t0 + kTilesAtATime));
    }
  }
}

// Calls visit(sources of 8 runs, tile, lane, first byte of the tile's block).
template <typename Visit>
void ForEachLaneOf(const WeightShape& shape, const K16Shape& k16, int64_t b, int64_t t0, int64_t t1,
                   Visit visit) {
  for (int64_t i = 0; i < K16Shape::kRun; ++i) {
    Source sources[8];
    for (int64_t j = 0; j < 8; ++j) {
      sources[j] = SourceOf(shape, k16, K16Shape::kBlockRows * b + 16 * j + i);
    }
    for (int64_t t = t0; t < t1; ++t) {
      visit(sources, t, i, (t * k16.blocks + b) * k16.tile_block_bytes());
    }
  }
}

// The words of one lane, of 32 columns of 4-bit codes. Row j of the lane is at `rows[16 j]`. A byte of
// a row has two columns: even ones go to words[0..3], odd ones to words[4..7], four in each.
void PackNibblesOfLane(const uint8_t* const* rows, int64_t offset, Bytes16* words) {
  Bytes16 even[4], odd[4];  // byte m of the words
  for (int64_t m = 0; m < 4; ++m) {
    Bytes16 low, high;
    std::memcpy(&low, rows[32 * m] + offset, sizeof(low));
    std::memcpy(&high, rows[32 * m + 16] + offset, sizeof(high));
    even[m] = (low & 0x0f) | (high & 0x0f) << 4;
    odd[m] = low >> 4 | (high & 0xf0);
  }
  for (const auto& [bytes, to] : {std::pair(even, words), std::pair(odd, words + 4)}) {
    Bytes16 halves[4];  // bytes 0 and 1 of eight words, then bytes 2 and 3
    Interleave<1>(bytes[0], bytes[1], &halves[0], &halves[1]);
    Interleave<1>(bytes[2], bytes[3], &halves[2], &halves[3]);
    Interleave<2>(halves[0], halves[2], &to[0], &to[1]);
    Interleave<2>(halves[1], halves[3], &to[2], &to[3]);
  }
}

constexpr int64_t kTilesOfNibbles = 4;  // packed at a time: 16 bytes of a row

// Packs four tiles of a block of codes that a HostWeight has in 4 bits. `bits`: 4 or 3. `rows`: where
// row 16 j + i of the block has its codes. `tile_bytes`: from one tile's block to the next one's.
void PackBlocksOfNibbles(const uint8_t* const* rows, int64_t offset, int bits, int64_t tile_bytes,
                         uint8_t* block) {
  for (int64_t i = 0; i < K16Shape::kRun; i += 4) {
    Bytes16 lanes[4][8];
    for (int64_t lane = 0; lane < 4; ++lane)
      PackNibblesOfLane(rows + i + lane, offset, lanes[lane]);
    for (int64_t v = 0; v < 8; ++v) {
      // Four lanes of four columns, to four columns of four lanes.
      Bytes16 pairs[4], columns[4];
      Interleave<4>(lanes[0][v], lanes[1][v], &pairs[0], &pairs[1]);
      Interleave<4>(lanes[2][v], lanes[3][v], &pairs[2], &pairs[3]);
      Interleave<8>(pairs[0], pairs[2], &columns[0], &columns[1]);
      Interleave<8>(pairs[1], pairs[3], &columns[2], &columns[3]);
      for (int64_t c = 0; c < 4; ++c) {
        const int64_t column = 2 * (v % 4 * 4 + c) + v / 4;
        uint8_t* const to = block + column / 8 * tile_bytes + column % 8 * K16Shape::kRun * bits;
        if (bits == 4) {
          std::memcpy(to + 4 * i, &columns[c], sizeof(columns[c]));
          continue;
        }
        uint32_t words[4];
        std::memcpy(words, &columns[c], sizeof(words));
        for (int64_t lane = 0; lane < 4; ++lane) {
          StoreLane(FromBytes(ToBytes(words[lane], 4), 3), 3, i + lane, to);
        }
      }
    }
  }
}

// Packs two tiles of a block of codes that a HostWeight has in 8 bits. `tile_bytes`: from one tile's
// block to the next one's.
void PackBlocksOfBytes(const uint8_t* const* rows, int64_t offset, uint8_t flip, int64_t tile_bytes,
                       uint8_t* block) {
  for (int64_t run = 0; run < K16Shape::kBlockRows; run += K16Shape::kRun) {
    Bytes16 w[16];
    for (int64_t i = 0; i < 16; ++i) std::memcpy(&w[i], rows[run + i] + offset, sizeof(w[i]));
    TransposeBytes(w);
    for (int64_t c = 0; c < 16; ++c) {
      w[c] ^= flip;
      std::memcpy(block + c / 8 * tile_bytes + c % 8 * K16Shape::kBlockRows + run, &w[c], 16);
    }
  }
}

void PackLanes(const HostWeight& w, ColumnRange columns, uint8_t* codes) {
  const WeightShape shape = w.shape();
  const K16Shape k16(shape);
  const uint64_t flip = Flip(w.scheme, k16.bits);
  const int64_t block_bytes = k16.tile_block_bytes();
  const int64_t tile_bytes = k16.blocks * block_bytes;  // of all its blocks
  // Tiles that are packed at a time, and how many tiles are whole, of codes that lie in 4 or 8 bits
  // of the weight.
  const int64_t step = w.code_bits() == 8 ? 2 : kTilesOfNibbles;
  const int64_t whole = w.code_bits() >= 4 ? w.n / K16Shape::kTile : 0;
  ForEachTiles(k16, columns, [&](int64_t b, int64_t t0, int64_t t1) {
    const uint8_t* rows[K16Shape::kBlockRows] = {};
    bool padded = false;
    for (int64_t row = 0; row < K16Shape::kBlockRows && t0 < whole; ++row) {
      const int64_t from = SourceOf(shape, k16, K16Shape::kBlockRows * b + row).row;
      padded |= from < 0;
      rows[row] = w.codes.data() + std::max<int64_t>(0, from) * w.row_bytes();
      for (int64_t t = t1; t < t1 + (t1 - t0); t += 64 / w.code_bits()) {
        __builtin_prefetch(rows[row] + t * w.code_bits(), 0, 2);  // of the tiles that come next
      }
    }
    for (; t0 + step <= std::min(t1, whole) && !padded; t0 += step) {
      alignas(64) uint8_t packed[kTilesOfNibbles * K16Shape::kTile * K16Shape::kRun * 4];
      if (step == kTilesOfNibbles) {
        PackBlocksOfNibbles(rows, 4 * t0, k16.bits, block_bytes, packed);
      } else {
        PackBlocksOfBytes(rows, 8 * t0, static_cast<uint8_t>(flip), block_bytes, packed);
      }
      for (int64_t t = 0; t < step; ++t) {
        StreamBytes(packed + t * block_bytes, codes + (t0 + t) * tile_bytes + b * block_bytes,
                    block_bytes);
      }
    }
    if (t0 == t1) return;
    ForEachLaneOf(
        shape, k16, b, t0, t1, [&](const Source* sources, int64_t tile, int64_t i, int64_t first) {
          uint64_t words[8];
          for (int j = 0; j < 8; ++j) {
            words[j] = sources[j].row >= 0
                           ? ToBytes(w.EightCodes(sources[j].row, tile * 8), w.code_bits())
                           : PaddingRow(w, sources[j].group, tile);
          }
          TransposeBytes(words);
          for (int c = 0; c < 8; ++c) {
            StoreLane(FromBytes(words[c] ^ flip, k16.bits), k16.bits, i,
                      codes + first + c * k16.block_bytes());
          }
        });
  });
  FinishStreams();
}

void UnpackLanes(const uint8_t* codes, HostWeight* w) {
  const WeightShape shape = w->shape();
  const K16Shape k16(shape);
  const uint64_t flip = Flip(w->scheme, k16.bits);
  ForEachTiles(k16, {0, w->n}, [&](int64_t b, int64_t t0, int64_t t1) {
    ForEachLaneOf(
        shape, k16, b, t0, t1, [&](const Source* sources, int64_t tile, int64_t i, int64_t first) {
          uint64_t words[8];
          for (int c = 0; c < 8; ++c) {
            words[c] = LoadLane(codes + first + c * k16.block_bytes(), k16.bits, i) ^ flip;
          }
          TransposeBytes(words);
          for (int j = 0; j < 8; ++j) {
            if (sources[j].row < 0) continue;
            StoreTileRow(w, sources[j].row, tile, FromBytes(words[j], w->code_bits()));
          }
        });
  });
}

// --- Scales and zeros ---

// Copies [groups][column blocks] cells of `size` bytes to [N/8][groups][8].
void PackCells(const std::vector<uint8_t>& in, const HostWeight& w, ColumnRange columns,
               int64_t size, uint8_t* out) {
  if (in.empty()) return;
  const int64_t groups = w.groups();
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t t = columns.begin / 8; t < CeilDiv(columns.end, 8); ++t) {
      uint8_t* cells = out + (t * groups + g) * 8 * size;
      const int64_t count = std::min<int64_t>(8, w.n - t * 8);
      if (w.scheme.block_cols == 1 && count == 8) {
        std::memcpy(cells, in.data() + (g * w.n + t * 8) * size, 8 * size);
        continue;
      }
      std::memset(cells, 0, 8 * size);
      for (int64_t c = 0; c < count; ++c) {
        std::memcpy(cells + c * size, in.data() + w.Cell(g, t * 8 + c) * size, size);
      }
    }
  }
}

void UnpackCells(const uint8_t* in, int64_t size, const HostWeight& w, std::vector<uint8_t>* out) {
  if (out->empty()) return;
  const int64_t groups = w.groups(), step = w.shape().block_cols();
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t n = 0; n < w.n; n += step) {
      std::memcpy(out->data() + w.Cell(g, n) * size, in + ((n / 8 * groups + g) * 8 + n % 8) * size,
                  size);
    }
  }
}

void Pack(const HostWeight& w, ColumnRange columns, const Sections& sections, uint8_t* out) {
  PackLanes(w, columns, out + sections.offset(Part::kCodes));
  PackCells(w.scales, w, columns, w.scheme.scale_bytes(), out + sections.offset(Part::kScales));
  PackCells(w.zeros, w, columns, w.scheme.zero_bytes(), out + sections.offset(Part::kZeros));
}

void Unpack(const WeightShape& shape, const uint8_t* in, const Sections& sections, HostWeight* w) {
  UnpackLanes(in + sections.offset(Part::kCodes), w);
  UnpackCells(in + sections.offset(Part::kScales), shape.scheme.scale_bytes(), *w, &w->scales);
  UnpackCells(in + sections.offset(Part::kZeros), shape.scheme.zero_bytes(), *w, &w->zeros);
}

}  // namespace

const Layout kK16Layout = {"k16", Refuses, AddSections, Pack, Unpack};

}  // namespace awqd
