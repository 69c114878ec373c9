// Layout "vectors": vector codes in the order in which the lanes of a warp decode them to the A
// operand of m16n8k16 (rows = out features). It takes the bytes of the blocks, no more.
//
// - A tile is one block, 256 in features, of each of 16 out features. Four tiles of 64 out features
//   make a record; records are [N / 64][K / 256]. N is padded with blocks of zeros.
// - A group is 32 in features: four vectors of eight. Round r of a tile has groups 4 r to 4 r + 3 of
//   its blocks; rounds follow each other. Lane 4 c + q has two items of a round: group 4 r + q of
//   columns c and c + 8.
// - A round has planes. In each a lane's two items lie together, one lane after the other:
//
//   plane     of an item
//   indices   a byte for each vector, the lowest first: the lower bits of its index. With two
//             indices for eight elements a second plane has those of elements 4 to 7
//   signs     32 bits. Bit 4 j + t is the sign of element j of vector t; of iq3 bit
//             16 (j % 2) + 4 (j / 2) + t, so that two elements have bits 16 apart. Where the eighth
//             sign follows from the others, bits 28 to 31 are the scale, of iq2_xs the ninth bits of
//             the four indices
//   high      iq2_s, iq3_s: 8 bits, two for each vector, the upper bits of its index or indices.
//             iq1: 16 bits, as the block has them
//   scales    8 bits: those of vectors 0 and 1 in the lower 4 bits, of 2 and 3 in the upper. iq3_s:
//             4 bits. iq1_m: 3 bits each, then bits 2 g and 2 g + 1 of d for group g
//
// - A tile ends with d in FP16, of columns c and c + 8 after each other, c = 0 .. 7; not of iq1_m.
//
// tests/kernels/layouts_test.cc reads elements by these sentences.
#include "kernels/layouts/vectors.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace awqd {
namespace {

using namespace vectors;

constexpr int kGroups = kVectorBlock / 32;  // of a block
constexpr int kVectorsOfGroup = 4;

uint32_t Load(const uint8_t* from, int bytes) {
  uint32_t out = 0;
  std::memcpy(&out, from, bytes);  // the machine is little endian too
  return out;
}
void Store(uint8_t* to, int bytes, uint32_t value) { std::memcpy(to, &value, bytes); }

// The bits of one group of a block, as a tile has them.
struct Group {
  uint8_t indices[2][kVectorsOfGroup] = {};
  uint32_t signs = 0;
  uint32_t high = 0;
  uint32_t scales = 0;
};

constexpr int SignBit(VectorCode code, int vector, int element) {
  if (!HasPairs(code)) return 4 * element + vector;
  return element % 2 * 16 + element / 2 * 4 + vector;
}

// The signs of a vector 0 in the order of a tile.
struct SpreadTable {
  uint32_t words[256] = {};
};
constexpr SpreadTable MakeSpreadTable(VectorCode code) {
  SpreadTable out;
  for (int signs = 0; signs < 256; ++signs) {
    for (int j = 0; j < 8; ++j) {
      out.words[signs] |= static_cast<uint32_t>(signs >> j & 1) << SignBit(code, 0, j);
    }
  }
  return out;
}

// Signs of the four vectors, `count` bits each, in the order of a tile and back.
uint32_t SpreadSigns(VectorCode code, int count, uint32_t block) {
  static constexpr SpreadTable kOnes = MakeSpreadTable(VectorCode::kIq2S);
  static constexpr SpreadTable kPairs = MakeSpreadTable(VectorCode::kIq3S);
  const SpreadTable& table = HasPairs(code) ? kPairs : kOnes;
  uint32_t out = 0;
  for (int t = 0; t < kVectorsOfGroup; ++t) {
    out |= table.words[block >> (count * t) & ((1u << count) - 1)] << t;
  }
  return out;
}
uint32_t JoinSigns(VectorCode code, int count, uint32_t tile) {
  uint32_t out = 0;
  for (int t = 0; t < kVectorsOfGroup; ++t) {
    for (int j = 0; j < count; ++j) {
      out |= (tile >> SignBit(code, t, j) & 1) << (count * t + j);
    }
  }
  return out;
}

constexpr uint32_t kSevenSigns = (1u << 28) - 1;  // of four vectors

uint32_t Bits(const uint8_t* from, int first, int count) {
  return Load(from + first / 8, 1) >> (first % 8) & ((1u << count) - 1);
}
// Adds bits to some that are zero.
void AddBits(uint8_t* to, int first, uint32_t value) {
  to[first / 8] = static_cast<uint8_t>(to[first / 8] | value << (first % 8));
}

// Where a block has the parts of group g.
struct Places {
  int indices = 0;  // of vector 0; the others follow it
  int signs = -1;   // 4 bytes
  int high = -1, high_bytes = 1;
  int scales = -1;
};
Places PlacesOf(VectorCode code, int g) {
  switch (code) {
    case VectorCode::kIq2Xxs:
      return {.indices = 2 + 8 * g, .signs = 6 + 8 * g};
    case VectorCode::kIq2Xs:
      return {.indices = 2 + 8 * g, .scales = 66 + g};
    case VectorCode::kIq2S:
      return {.indices = 2 + 4 * g, .signs = 34 + 4 * g, .high = 66 + g, .scales = 74 + g};
    case VectorCode::kIq3Xxs:
      return {.indices = 2 + 8 * g, .signs = 66 + 4 * g};
    case VectorCode::kIq3S:
      return {.indices = 2 + 8 * g, .signs = 74 + 4 * g, .high = 66 + g};
    case VectorCode::kIq1S:
      return {.indices = 2 + 4 * g, .high = 34 + 2 * g, .high_bytes = 2};
    default:
      return {.indices = 4 * g, .high = 32 + 2 * g, .high_bytes = 2};
  }
}

// iq1_m: three bits each of two scales, in a word of 16 bits for two groups.
int Iq1mScalesAt(int g) { return 48 + g / 2 * 2; }
// A word's upper four bits are of d.
int Iq1mFactorAt(int g) { return 8 * Iq1mScalesAt(g) + 12 + g % 2 * 2; }

Group ReadGroup(VectorCode code, const uint8_t* block, int g) {
  const Places at = PlacesOf(code, g);
  Group out;
  const bool pairs = HasPairs(code);
  for (int t = 0; t < kVectorsOfGroup; ++t) {
    const int step = pairs || code == VectorCode::kIq2Xs ? 2 : 1;
    out.indices[0][t] = block[at.indices + step * t];
    if (pairs) out.indices[1][t] = block[at.indices + 2 * t + 1];
  }
  if (at.high >= 0) out.high = Load(block + at.high, at.high_bytes);
  if (at.scales >= 0) out.scales = block[at.scales];
  switch (code) {
    case VectorCode::kIq2Xxs:
    case VectorCode::kIq3Xxs: {
      const uint32_t word = Load(block + at.signs, 4);
      out.signs = SpreadSigns(code, 7, word) | (word & ~kSevenSigns);
      break;
    }
    case VectorCode::kIq2Xs:
      for (int t = 0; t < kVectorsOfGroup; ++t) {
        const uint32_t upper = block[at.indices + 2 * t + 1];
        out.signs |= SpreadSigns(code, 7, (upper >> 1) << (7 * t)) | (upper & 1) << (28 + t);
      }
      break;
    case VectorCode::kIq2S:
    case VectorCode::kIq3S:
      out.signs = SpreadSigns(code, 8, Load(block + at.signs, 4));
      if (code == VectorCode::kIq3S) out.scales = Bits(block, 8 * 106 + 4 * g, 4);
      break;
    case VectorCode::kIq1M:
      out.scales = Load(block + Iq1mScalesAt(g), 2) >> (g % 2 * 6) & 63;
      out.scales |= Bits(block, Iq1mFactorAt(g), 2) << 6;
      break;
    default:
      break;
  }
  return out;
}

// Into a block of zeros.
void WriteGroup(VectorCode code, const Group& group, int g, uint8_t* block) {
  const Places at = PlacesOf(code, g);
  const bool pairs = HasPairs(code);
  for (int t = 0; t < kVectorsOfGroup; ++t) {
    const int step = pairs || code == VectorCode::kIq2Xs ? 2 : 1;
    block[at.indices + step * t] = group.indices[0][t];
    if (pairs) block[at.indices + 2 * t + 1] = group.indices[1][t];
  }
  if (at.high >= 0) Store(block + at.high, at.high_bytes, group.high);
  if (at.scales >= 0) block[at.scales] = static_cast<uint8_t>(group.scales);
  switch (code) {
    case VectorCode::kIq2Xxs:
    case VectorCode::kIq3Xxs:
      Store(block + at.signs, 4, JoinSigns(code, 7, group.signs) | (group.signs & ~kSevenSigns));
      break;
    case VectorCode::kIq2Xs: {
      const uint32_t signs = JoinSigns(code, 7, group.signs);
      for (int t = 0; t < kVectorsOfGroup; ++t) {
        block[at.indices + 2 * t + 1] =
            static_cast<uint8_t>((signs >> (7 * t) & 127) << 1 | (group.signs >> (28 + t) & 1));
      }
      break;
    }
    case VectorCode::kIq2S:
    case VectorCode::kIq3S:
      Store(block + at.signs, 4, JoinSigns(code, 8, group.signs));
      if (code == VectorCode::kIq3S) AddBits(block, 8 * 106 + 4 * g, group.scales & 15);
      break;
    case VectorCode::kIq1M: {
      uint8_t* const word = block + Iq1mScalesAt(g);
      Store(word, 2, Load(word, 2) | (group.scales & 63) << (g % 2 * 6));
      AddBits(block, Iq1mFactorAt(g), group.scales >> 6);
      break;
    }
    default:
      break;
  }
}

// The place of a group of a column in a tile.
class Item {
 public:
  Item(VectorCode code, int column, int group)
      : code_(code),
        round_(group / 4 * RoundBytes(code)),
        item_(column % 8 * 4 + group % 4, column / 8) {}

  Group Read(const uint8_t* tile) const {
    const uint8_t* const round = tile + round_;
    Group out;
    for (int p = 0; p < IndexPlanes(code_); ++p) {
      std::memcpy(out.indices[p], round + IndicesAt(p), kVectorsOfGroup);
    }
    if (SignBytes(code_) > 0) out.signs = Load(round + SignsAt(code_) + 4 * Number(), 4);
    if (const int bytes = HighBytes(code_) / 2; bytes > 0) {
      out.high = Load(round + HighAt(code_) + Number() * bytes, bytes);
    }
    if (const int bits = 4 * ScaleBytes(code_); bits > 0) {
      out.scales = Bits(round + ScalesAt(code_), Number() * bits, bits);
    }
    return out;
  }
  // Into a tile of zeros.
  void Write(const Group& group, uint8_t* tile) const {
    uint8_t* const round = tile + round_;
    for (int p = 0; p < IndexPlanes(code_); ++p) {
      std::memcpy(round + IndicesAt(p), group.indices[p], kVectorsOfGroup);
    }
    if (SignBytes(code_) > 0) Store(round + SignsAt(code_) + 4 * Number(), 4, group.signs);
    if (const int bytes = HighBytes(code_) / 2; bytes > 0) {
      Store(round + HighAt(code_) + Number() * bytes, bytes, group.high);
    }
    if (const int bits = 4 * ScaleBytes(code_); bits > 0) {
      AddBits(round + ScalesAt(code_), Number() * bits, group.scales);
    }
  }

 private:
  int Number() const { return 2 * item_.first + item_.second; }
  int IndicesAt(int plane) const { return 32 * kIndexBytes * plane + 4 * Number(); }

  const VectorCode code_;
  const int round_;                 // bytes
  const std::pair<int, int> item_;  // lane, and which of its two
};

void PackBlock(VectorCode code, const uint8_t* block, int column, uint8_t* tile) {
  for (int g = 0; g < kGroups; ++g) {
    Item(code, column, g).Write(ReadGroup(code, block, g), tile);
  }
  if (code == VectorCode::kIq1M) return;
  std::memcpy(tile + FactorsAt(code) + column % 8 * 4 + column / 8 * 2, block, 2);
}

void UnpackBlock(VectorCode code, const uint8_t* tile, int column, uint8_t* block) {
  std::memset(block, 0, VectorBlockBytes(code));
  for (int g = 0; g < kGroups; ++g) {
    WriteGroup(code, Item(code, column, g).Read(tile), g, block);
  }
  if (code == VectorCode::kIq1M) return;
  std::memcpy(block, tile + FactorsAt(code) + column % 8 * 4 + column / 8 * 2, 2);
}

int64_t TileOffset(const WeightShape& shape, int64_t n, int64_t block) {
  const int64_t record = n / kRecordColumns * shape.code_rows() + block;
  return (record * kRecordTiles + n % kRecordColumns / kTileColumns) *
         TileBytes(shape.scheme.vector);
}

std::string Refuses(const WeightShape& shape) {
  if (shape.scheme.code == CodeKind::kVector) return "";
  return absl::StrCat("holds vector codes alone, got ", ToString(shape.scheme));
}

void AddSections(const WeightShape& shape, Sections* sections) {
  sections->Add(Part::kCodes, Records(shape.n) * shape.code_rows() * kRecordTiles *
                                  TileBytes(shape.scheme.vector));
}

void Pack(const HostWeight& w, ColumnRange columns, const Sections& sections, uint8_t* out) {
  const WeightShape shape = w.shape();
  const VectorCode code = w.scheme.vector;
  uint8_t* const codes = out + sections.offset(Part::kCodes);
  const int64_t end = columns.end == w.n ? Records(w.n) * kRecordColumns : columns.end;
  for (int64_t n = columns.begin; n < end; n += kTileColumns) {
    for (int64_t block = 0; block < shape.code_rows(); ++block) {
      uint8_t* const tile = codes + TileOffset(shape, n, block);
      std::memset(tile, 0, TileBytes(code));
      for (int c = 0; c < kTileColumns && n + c < w.n; ++c) {
        PackBlock(code, w.codes.data() + (block * w.n + n + c) * VectorBlockBytes(code), c, tile);
      }
    }
  }
}

void Unpack(const WeightShape& shape, const uint8_t* in, const Sections& sections, HostWeight* w) {
  const VectorCode code = shape.scheme.vector;
  const uint8_t* const codes = in + sections.offset(Part::kCodes);
  for (int64_t block = 0; block < shape.code_rows(); ++block) {
    for (int64_t n = 0; n < shape.n; ++n) {
      UnpackBlock(code, codes + TileOffset(shape, n, block), static_cast<int>(n % kTileColumns),
                  w->codes.data() + (block * shape.n + n) * VectorBlockBytes(code));
    }
  }
}

}  // namespace

const Layout kVectorsLayout = {"vectors", Refuses, AddSections, Pack, Unpack};

}  // namespace awqd
