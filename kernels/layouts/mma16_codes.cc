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

// PaddingOf for columns [column, column + 8), in the form of EightCodes.
uint64_t PaddingCodes(const HostWeight& w, int64_t column) {
  uint64_t word = 0;
  for (int i = 0; i < std::min<int64_t>(8, w.n - column); ++i) {
    word |= static_cast<uint64_t>(PaddingOf(w, column + i)) << w.code_bits() * i;
  }
  return word;
}

// The codes of a record, row by row, kBits bits each. Rows of a weight are mostly powers of two
// apart, so that their lines displace one another in the first cache: packers read each line once.
template <int kBits>
struct Staged {
  static constexpr int kRowBytes = kTileN * kBits / 8;

  // For codes that a HostWeight has in kBits bits.
  void LoadCodes(const HostWeight& w, int64_t n0, int64_t k0) {
    if (n0 + kTileN <= w.n && k0 + kBlockK <= w.k) {
      const uint8_t* from = w.codes.data() + k0 * w.row_bytes() + n0 * kBits / 8;
      for (int k = 0; k < kBlockK; ++k, from += w.row_bytes()) {
        std::memcpy(row[k], from, kRowBytes);
        __builtin_prefetch(from + 64, 0, 2);  // for a record behind this one
      }
      return;
    }
    LoadEights(w, n0, k0, [](uint64_t eight) { return eight; });
  }

  // For others, which `convert` brings to kBits bits, eight columns at a time.
  template <typename Convert>
  void LoadEights(const HostWeight& w, int64_t n0, int64_t k0, Convert convert) {
    for (int k = 0; k < kBlockK; ++k) {
      for (int n = 0; n < kTileN; n += 8) {
        uint64_t eight = 0;
        if (n0 + n < w.n) {
          eight = convert(k0 + k < w.k ? w.EightCodes(k0 + k, n0 + n) : PaddingCodes(w, n0 + n));
        }
        std::memcpy(row[k] + n * kBits / 8, &eight, kBits);
      }
    }
  }

  alignas(64) uint8_t row[kBlockK][kRowBytes];
};

// The rows of a lane's pairs along K, in the order of a word of PackBytes.
constexpr int kRowsOfWord[4] = {0, 8, 1, 9};

// The words of lane `pair` and of every fourth behind it hold pairs of the same rows. A byte of a
// word has a code of columns n and n + 8 each, in the lower and in the upper half; a byte of a row
// has two neighbours.
void PackNibbles(const Staged<4>& codes, uint8_t* record) {
  for (int half = 0; half < 2; ++half) {  // along K
    for (int pair = 0; pair < 4; ++pair) {
      for (int tiles = 0; tiles < 2; ++tiles) {  // two of 16 columns: 16 bytes of a row
        Bytes16 w[16];
        for (int i = 0; i < 16; ++i) {
          const int k = half * kUnitK + i / 4 * 16 + 2 * pair + kRowsOfWord[i % 4];
          std::memcpy(&w[i], codes.row[k] + 16 * tiles, sizeof(w[i]));
        }
        TransposeBytes(w);
        for (int tile = 0; tile < 2; ++tile) {
          uint8_t* to = record + ((2 * tiles + tile) * 2 + half) * UnitBytes(4) + pair * 16;
          for (int byte = 0; byte < 4; ++byte, to += 128) {
            const Bytes16 first = w[8 * tile + byte], second = w[8 * tile + 4 + byte];
            const Bytes16 even = (first & 0x0f) | second << 4, odd = first >> 4 | (second & 0xf0);
            std::memcpy(to, &even, sizeof(even));
            std::memcpy(to + 64, &odd, sizeof(odd));
          }
        }
      }
    }
  }
}

// Four vectors of four words to four vectors of the words at each place.
void TransposeWords(Bytes16 w[4]) {
  Bytes16 low[2], high[2];
  Interleave<4>(w[0], w[1], &low[0], &high[0]);
  Interleave<4>(w[2], w[3], &low[1], &high[1]);
  Interleave<8>(low[0], low[1], &w[0], &w[1]);
  Interleave<8>(high[0], high[1], &w[2], &w[3]);
}

// A word holds rows 2 pair + {0, 8, 1, 9} of one out feature.
void PackBytes(const Staged<8>& codes, uint8_t* record) {
  for (int half = 0; half < 2 * kBlockK / kUnitK; ++half) {  // of a unit: two steps
    for (int tile = 0; tile < kTileN / kRowTile; ++tile) {
      Bytes16 steps[2][16];  // by column: the words of all pairs
      for (int step = 0; step < 2; ++step) {
        for (int i = 0; i < 16; ++i) {
          const int k = half * 32 + step * 16 + i / 4 * 2 + kRowsOfWord[i % 4];
          std::memcpy(&steps[step][i], codes.row[k] + tile * kRowTile, sizeof(steps[step][i]));
        }
        TransposeBytes(steps[step]);
      }
      uint8_t* const to = record + (tile * 2 + half / 2) * UnitBytes(8) + half % 2 * 512;
      for (int n = 0; n < 8; ++n) {
        Bytes16 words[4] = {steps[0][n], steps[0][n + 8], steps[1][n], steps[1][n + 8]};
        TransposeWords(words);
        std::memcpy(to + n * sizeof(words), words, sizeof(words));
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

}  // namespace

void PackCodes(const HostWeight& w, int64_t n0, int64_t k0, uint8_t* record) {
  const int bits = w.scheme.bits;
  if (bits == 4) {
    Staged<4> codes;
    codes.LoadCodes(w, n0, k0);
    return PackNibbles(codes, record);
  }
  Staged<8> codes;
  if (bits == 8) {
    codes.LoadCodes(w, n0, k0);
    return PackBytes(codes, record);
  }
  codes.LoadEights(w, n0, k0, [&](uint64_t eight) { return AsBytes(eight, w.code_bits()); });
  uint8_t bytes[CodesBytes(8)];
  PackBytes(codes, bytes);
  for (int unit = 0; unit < kTileN / kRowTile * 2; ++unit) {
    PackPlanes(bits, bytes + unit * UnitBytes(8), record + unit * UnitBytes(bits));
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
