// Packs the codes of a record of layout "mma16". The table at the head of mma16.cc has their
// places.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/base/nibbles.h"
#include "kernels/layouts/mma16.h"

namespace awqd::mma16 {
namespace {

// The code that pads column n along K. It decodes to 0; in a table to the least magnitude. With
// zeros as real numbers any code will do, because activations are 0 there.
int PaddingOf(const HostWeight& w, int64_t n) {
  if (HasRealZeros(w.shape())) return 0;
  if (w.table.empty()) return w.Zero(w.groups() - 1, n);
  const auto smaller = [](float a, float b) { return std::fabs(a) < std::fabs(b); };
  return static_cast<int>(std::min_element(w.table.begin(), w.table.end(), smaller) -
                          w.table.begin());
}

// Calls fn(place, lowest bit of the code, mask of so many bits) for each plane of a code.
template <typename Fn>
void ForEachPlane(int bits, int n, int k, Fn fn) {
  int lowest = 0;
  for (int plane = 0; plane < kMostPlanes; ++plane) {
    const int width = PlaneBits(bits, plane);
    if (width == 0) break;
    fn(PlaceOfCode(bits, plane, n, k), lowest, (1 << width) - 1);
    lowest += width;
  }
}

void StoreCode(HostWeight* w, int64_t row, int64_t col, int code) {
  const int bits = w->code_bits();
  uint8_t& byte = w->codes[row * w->row_bytes() + col * bits / 8];
  const int shift = col * bits % 8;
  byte = static_cast<uint8_t>((byte & ~(((1 << bits) - 1) << shift)) | code << shift);
}

// Eight columns of a row are read at once.

// PaddingOf for columns [column, column + 8), in the form of EightCodes.
uint64_t PaddingCodes(const HostWeight& w, int64_t column) {
  uint64_t word = 0;
  for (int i = 0; i < std::min<int64_t>(8, w.n - column); ++i) {
    word |= static_cast<uint64_t>(PaddingOf(w, column + i)) << w.code_bits() * i;
  }
  return word;
}

// Reads eight columns of a row of a record. kWhole: the record has no padding. It is a constant,
// because a test for each word would take as long as the rest.
template <typename Word, bool kWhole>
class RecordCodes {
 public:
  explicit RecordCodes(const HostWeight& w)
      : w_(w), codes_(w.codes.data()), row_bytes_(w.row_bytes()) {}

  Word At(int64_t row, int64_t column) const {
    Word word = 0;
    if constexpr (kWhole) {
      std::memcpy(&word, codes_ + row * row_bytes_ + column / 8 * sizeof(word), sizeof(word));
    } else if (column < w_.n) {
      word = static_cast<Word>(row < w_.k ? w_.EightCodes(row, column) : PaddingCodes(w_, column));
    }
    return word;
  }

 private:
  const HostWeight& w_;
  const uint8_t* const codes_;
  const int64_t row_bytes_;
};

constexpr int kSteps = kUnitK / 16;
using Steps = uint32_t __attribute__((vector_size(4 * kSteps)));

// Eight lanes own one pair of columns of K of a fragment (the same lane % 4). Their words are the
// transposed nibbles of 8 words of codes, each of 8 out features of one row. Nibble i of a lane
// comes from word i: row 2 pair + kCorners[i].k, out features from kCorners[i].n on. The words of
// the four steps of a unit lie side by side in the record, so they are transposed at once.
template <bool kWhole>
void PackNibbles(const RecordCodes<uint32_t, kWhole>& codes, int64_t n, int64_t k, uint8_t* unit) {
  struct Corner {
    int k;
    int n;
  };
  constexpr Corner kCorners[8] = {{0, 0}, {0, 8}, {8, 0}, {8, 8}, {1, 0}, {1, 8}, {9, 0}, {9, 8}};
  for (int pair = 0; pair < 4; ++pair) {
    Steps words[8];
    for (int i = 0; i < 8; ++i) {
      for (int step = 0; step < kSteps; ++step) {
        words[i][step] = codes.At(k + 16 * step + 2 * pair + kCorners[i].k, n + kCorners[i].n);
      }
    }
    TransposeNibbles(words);
    uint8_t* const to = unit + pair * sizeof(Steps);  // for lane `pair`, then for every fourth
    for (int r = 0; r < 8; ++r) std::memcpy(to + r * 4 * sizeof(Steps), &words[r], sizeof(Steps));
  }
}

// A word holds rows 2 pair + {0, 8, 1, 9} of one out feature.
template <typename Codes>
void PackBytes(const Codes& codes, int64_t n, int64_t k, uint8_t* unit) {
  constexpr int kRows[4] = {0, 8, 1, 9};
  for (int i = 0; i < 2 * kSteps; ++i) {  // the lanes' words
    uint8_t* const to = unit + i / 4 * 512 + i % 4 * 4;
    for (int pair = 0; pair < 4; ++pair) {
      uint64_t rows[4];
      for (int r = 0; r < 4; ++r) {
        rows[r] = codes.At(k + i / 2 * 16 + 2 * pair + kRows[r], n + i % 2 * 8);
      }
      for (int column = 0; column < 8; ++column) {
        uint32_t word = 0;
        for (int r = 0; r < 4; ++r) word |= (rows[r] >> 8 * column & 0xff) << 8 * r;
        std::memcpy(to + (column * 4 + pair) * 16, &word, sizeof(word));
      }
    }
  }
}

// Eight codes of `bits` bits, side by side from the lowest on, as bytes.
uint64_t AsBytes(uint64_t codes, int bits) {
  if (bits == 2) {
    codes = (codes | codes << 24) & 0x000000ff000000ff;
    codes = (codes | codes << 12) & 0x000f000f000f000f;
    codes = (codes | codes << 6) & 0x0303030303030303;
  } else if (bits == 4) {
    codes = (codes | codes << 16) & 0x0000ffff0000ffff;
    codes = (codes | codes << 8) & 0x00ff00ff00ff00ff;
    codes = (codes | codes << 4) & 0x0f0f0f0f0f0f0f0f;
  }
  return codes;
}

// The same as RecordCodes<uint64_t> for codes of any width.
class CodesAsBytes {
 public:
  explicit CodesAsBytes(const HostWeight& w) : w_(w), bits_(w.code_bits()) {}

  uint64_t At(int64_t row, int64_t column) const {
    if (column >= w_.n) return 0;
    return AsBytes(row < w_.k ? w_.EightCodes(row, column) : PaddingCodes(w_, column), bits_);
  }

 private:
  const HostWeight& w_;
  const int bits_;
};

// The planes of codes of 1 to 3 and of 5 to 7 bits, from the words of PackBytes.
void PackPlanes(int bits, const uint8_t* bytes, uint8_t* unit) {
  constexpr int kOneBit[4] = {2, 3, 10, 11};
  const int first = PlaneBits(bits, 0);
  uint8_t* const second = unit + UnitBytes(first);
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t words[8], four[4] = {}, two[2] = {}, one = 0;
    std::memcpy(words, bytes + lane * 16, 16);
    std::memcpy(words + 4, bytes + 512 + lane * 16, 16);
    for (int r = 0; r < 8; ++r) {
      const uint32_t word = words[r];
      if (first == 4) {
        four[r / 2] |= (word & 0x0f0f0f0fu) << 4 * (r % 2);
        two[r / 4] |= (word >> 4 & 0x03030303u) << 2 * (r % 4);
        one |= (word >> (bits == 5 ? 4 : 6) & 0x01010101u) << r;
      } else {
        // Bytes 0 and 2 are the step's pair r % 2, bytes 1 and 3 the pair after the next.
        const auto pairs = [&](int lowest, uint32_t mask) {
          return (word >> lowest & mask) << 2 * (r % 2) | (word >> (8 + lowest) & mask)
                                                              << (2 * (r % 2) + 4);
        };
        two[r / 4] |= pairs(0, 0x00030003u) << 8 * (r / 2 % 2);
        one |= std::rotl(pairs(bits == 3 ? 2 : 0, 0x00010001u), kOneBit[r / 2]);
      }
    }
    if (first == 4) std::memcpy(unit + lane * 16, four, 16);
    if (first == 2) std::memcpy(unit + lane * 8, two, 8);
    if (bits == 6 || bits == 7) std::memcpy(second + lane * 8, two, 8);
    if (bits == 5 || bits == 3) std::memcpy(second + lane * 4, &one, 4);
    if (bits == 7) std::memcpy(second + UnitBytes(2) + lane * 4, &one, 4);
    if (bits == 1) std::memcpy(unit + lane * 4, &one, 4);
  }
}

// Calls pack(codes, first n and k of a unit, its bytes) for every unit of a record.
template <typename Codes, typename Pack>
void PackUnitsOf(const Codes& codes, int bits, int64_t n0, int64_t k0, uint8_t* record, Pack pack) {
  for (int unit = 0; unit < kTileN / kRowTile * 2; ++unit) {
    pack(codes, n0 + unit / 2 * kRowTile, k0 + unit % 2 * kUnitK, record + unit * UnitBytes(bits));
  }
}
template <typename Word, typename Pack>
void PackUnits(const HostWeight& w, int64_t n0, int64_t k0, uint8_t* record, Pack pack) {
  const auto pack_all = [&](const auto& codes) {
    PackUnitsOf(codes, w.scheme.bits, n0, k0, record, pack);
  };
  const bool whole = n0 + kTileN <= w.n && k0 + kBlockK <= w.k;
  whole ? pack_all(RecordCodes<Word, true>(w)) : pack_all(RecordCodes<Word, false>(w));
}

}  // namespace

void PackCodes(const HostWeight& w, int64_t n0, int64_t k0, uint8_t* record) {
  switch (w.scheme.bits) {
    case 4:
      return PackUnits<uint32_t>(w, n0, k0, record,
                                 [](const auto& codes, auto... at) { PackNibbles(codes, at...); });
    case 8:
      return PackUnits<uint64_t>(w, n0, k0, record,
                                 [](const auto& codes, auto... at) { PackBytes(codes, at...); });
    default:
      return PackUnitsOf(CodesAsBytes(w), w.scheme.bits, n0, k0, record,
                         [&](const CodesAsBytes& codes, int64_t n, int64_t k, uint8_t* unit) {
                           uint8_t bytes[UnitBytes(8)];
                           PackBytes(codes, n, k, bytes);
                           PackPlanes(w.scheme.bits, bytes, unit);
                         });
  }
}

void UnpackCodes(const uint8_t* record, int64_t n0, int64_t k0, HostWeight* w) {
  const int bits = w->scheme.bits;
  for (int k = 0; k < std::min<int64_t>(kBlockK, w->k - k0); ++k) {
    for (int n = 0; n < std::min<int64_t>(kTileN, w->n - n0); ++n) {
      int code = 0;
      ForEachPlane(bits, n, k, [&](CodePlace at, int lowest, int mask) {
        code |= (record[at.byte] >> at.bit & mask) << lowest;
      });
      StoreCode(w, k0 + k, n0 + n, code);
    }
  }
}

CodePlace PlaceOfCode(int bits, int plane, int n, int k) {
  constexpr int kOneBit[4] = {2, 3, 10, 11};
  int base = (n / kRowTile * 2 + k / kUnitK) * UnitBytes(bits);
  for (int before = 0; before < plane; ++before) base += UnitBytes(PlaneBits(bits, before));
  const int width = PlaneBits(bits, plane);
  const int lane = n % 8 * 4 + k % 8 / 2;
  const int step = k % kUnitK / 16, pair = n % kRowTile / 8 + 2 * (k % 16 / 8);
  const int upper = 16 * (k % 2);
  int word = 0, bit = 0;
  if (bits > 4 && bits < 8 && plane > 0) {
    // Byte by byte as words of 8-bit codes: each step and row takes bits of its own.
    const int place = 2 * step + pair % 2;
    word = place * width / 8, bit = 8 * (pair / 2) + place * width % 8;
  } else if (width == 8) {
    word = 2 * step + pair % 2, bit = 8 * (pair / 2);
  } else if (width == 4) {
    word = step, bit = 4 * pair;
  } else if (width == 2) {
    word = step / 2, bit = 8 * (step % 2) + 2 * pair;
  } else {
    bit = kOneBit[step] + 2 * pair;
  }
  const int lane_bytes = 4 * width;
  bit = (bit + upper) % 32;
  if (width == 8) return {base + word / 4 * 512 + lane * 16 + word % 4 * 4 + bit / 8, bit % 8};
  return {base + lane * lane_bytes + word * 4 + bit / 8, bit % 8};
}

}  // namespace awqd::mma16
