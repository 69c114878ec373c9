// Packs the codes of a record of layout "mma16". The table at the head of mma16.cc has their
// places.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/base/nibbles.h"
#include "kernels/layouts/mma16.h"

namespace awqd::mma16 {
namespace {

// The code that pads column n along K. It decodes to 0; in a table to the least magnitude. With
// real zeros any code will do, because activations are 0 there.
int PaddingOf(const HostWeight& w, int64_t n) {
  if (w.scheme.real_zeros()) return 0;
  if (w.table.empty()) return w.Zero(w.groups() - 1, n);
  const auto smaller = [](float a, float b) { return std::fabs(a) < std::fabs(b); };
  return static_cast<int>(std::min_element(w.table.begin(), w.table.end(), smaller) -
                          w.table.begin());
}

// The code at [k, n], or PaddingOf(n) past the last row.
int CodeAt(const HostWeight& w, int64_t k, int64_t n) {
  if (n >= w.n) return 0;
  return k < w.k ? w.Code(k, n) : PaddingOf(w, n);
}

// Packs codes of any width one by one.
void PackAnyCodes(const HostWeight& w, int64_t n0, int64_t k0, uint8_t* record) {
  const int bits = w.scheme.bits;
  std::memset(record, 0, CodesBytes(bits));
  for (int k = 0; k < kBlockK; ++k) {
    for (int n = 0; n < kTileN; ++n) {
      const int code = CodeAt(w, k0 + k, n0 + n);
      const CodePlace low = PlaceOfCode(bits, 0, n, k);
      if (bits != 3) {
        record[low.byte] |= code << low.bit;
        continue;
      }
      const CodePlace high = PlaceOfCode(bits, 1, n, k);
      record[low.byte] |= (code & 3) << low.bit;
      record[high.byte] |= (code >> 2) << high.bit;
    }
  }
}

void StoreCode(HostWeight* w, int64_t row, int64_t col, int code) {
  const int bits = w->code_bits();
  uint8_t& byte = w->codes[row * w->row_bytes() + col * bits / 8];
  const int shift = col * bits % 8;
  byte = static_cast<uint8_t>((byte & ~(((1 << bits) - 1) << shift)) | code << shift);
}

// Codes of 4 and 8 bits, which nearly all weights have, are packed faster: eight columns of a row
// are read at once.

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
template <bool kWhole>
void PackBytes(const RecordCodes<uint64_t, kWhole>& codes, int64_t n, int64_t k, uint8_t* unit) {
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

// Calls pack(codes of the record, first n and k of a unit, its bytes) for every unit of a record.
template <typename Word, typename Pack>
void PackUnits(const HostWeight& w, int64_t n0, int64_t k0, uint8_t* record, Pack pack) {
  const int bytes = UnitBytes(w.code_bits());
  const auto pack_all = [&](const auto& codes) {
    for (int unit = 0; unit < kTileN / kRowTile * 2; ++unit) {
      pack(codes, n0 + unit / 2 * kRowTile, k0 + unit % 2 * kUnitK, record + unit * bytes);
    }
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
      return PackAnyCodes(w, n0, k0, record);
  }
}

void UnpackCodes(const uint8_t* record, int64_t n0, int64_t k0, HostWeight* w) {
  const int bits = w->scheme.bits;
  const int width = bits == 3 ? 2 : bits, mask = (1 << width) - 1;
  for (int k = 0; k < std::min<int64_t>(kBlockK, w->k - k0); ++k) {
    for (int n = 0; n < std::min<int64_t>(kTileN, w->n - n0); ++n) {
      const CodePlace low = PlaceOfCode(bits, 0, n, k);
      int code = record[low.byte] >> low.bit & mask;
      if (bits == 3) {
        const CodePlace high = PlaceOfCode(bits, 1, n, k);
        code |= (record[high.byte] >> high.bit & 1) << 2;
      }
      StoreCode(w, k0 + k, n0 + n, code);
    }
  }
}

CodePlace PlaceOfCode(int bits, int plane, int n, int k) {
  constexpr int kOneBit[4] = {2, 3, 10, 11};
  const int unit = (n / kRowTile * 2 + k / kUnitK) * UnitBytes(bits);
  const int lane = n % 8 * 4 + k % 8 / 2;
  const int step = k % kUnitK / 16, pair = n % kRowTile / 8 + 2 * (k % 16 / 8);
  const int upper = 16 * (k % 2);
  int word = 0, bit = 0, lane_bytes = 0, base = unit;
  if (bits == 8) {
    word = 2 * step + pair % 2, bit = 8 * (pair / 2), lane_bytes = 16;
    base += word / 4 * 512, word %= 4;
  } else if (bits == 4) {
    word = step, bit = 4 * pair, lane_bytes = 16;
  } else if (bits == 2 || (bits == 3 && plane == 0)) {
    word = step / 2, bit = 8 * (step % 2) + 2 * pair, lane_bytes = 8;
  } else {
    bit = kOneBit[step] + 2 * pair, lane_bytes = 4;
    if (bits == 3) base += UnitBytes(2);
  }
  bit = (bit + upper) % 32;
  return {base + lane * lane_bytes + word * 4 + bit / 8, bit % 8};
}

}  // namespace awqd::mma16
