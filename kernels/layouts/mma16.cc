// Layout "mma16": records of 64 out features x 128 in features in tensor-core fragment order.
//
//   record            at ((n / 64) * BlocksK + k / 128) * RecordBytes
//     unit            (i, h) = (n % 64 / 16, k % 128 / 64) at (2 i + h) * 512
//       lane          (n % 8) * 4 + k % 8 / 2, at 16 bytes each: lane `l` of a warp owns row l / 4
//       and column
//                     pair l % 4 of every 8 x 8 quarter of a fragment
//         word        k % 64 / 16
//           nibble    0 4 1 5 2 6 3 7 [e],  e = k % 2 + 2 * (n % 16 / 8) + 4 * (k % 16 / 8)
//     meta            j = k % 128 / (128 / metas), at 4096 + 160 j
//       scale         16 bits at (n % 64 / 16) * 32 + (n % 8) * 4 + (n % 16 / 8) * 2
//       zero          nibble n % 16 / 8 of the byte at 128 + (n % 64 / 16) * 8 + n % 8
//
// Padding decodes to 0: along N (to 64) code, zero and scale are 0; along K (to 128) codes are the
// zero points of the last group, whose meta serves them where a group is all of K. Symmetric
// schemes store their zero point, 2^(bits-1), like any other.
#include "kernels/layouts/mma16.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/layouts/nibbles.h"

namespace awqd {
namespace {

using namespace mma16;  // NOLINT: the geometry of this very file

std::string Refuses(const WeightShape& shape) {
  const QuantScheme& s = shape.scheme;
  if (CodeBits(s.bits) != 4) return absl::StrCat("holds 4-bit codes, got ", s.bits, " bits");
  if (SizeOf(s.scale_dtype) != 2) {
    return absl::StrCat("holds 16-bit scales, got ", Name(s.scale_dtype));
  }
  if (s.group_size != shape.k && s.group_size % kRowTile != 0) {
    return absl::StrCat("group size ", s.group_size, " is neither K nor a multiple of ", kRowTile);
  }
  return "";
}

int Metas(const WeightShape& shape) { return MetasPerRecord(shape.k, shape.scheme.group_size); }

LayoutExtent Extent(const WeightShape& shape) {
  // One section: scales and zeros lie beside the codes they decode.
  return {.codes_bytes = TilesN(shape.n) * BlocksK(shape.k) * RecordBytes(Metas(shape))};
}

// Calls fn(record index, first n, first k) for every record of some columns. Rows outermost:
// neighbours share the cache lines of the canonical codes.
template <typename Fn>
void ForEachRecord(ColumnRange columns, int64_t k, Fn fn) {
  for (int64_t block = 0; block < BlocksK(k); ++block) {
    for (int64_t tile = columns.begin / kTileN; tile < TilesN(columns.end); ++tile) {
      fn(tile * BlocksK(k) + block, tile * kTileN, block * kBlockK);
    }
  }
}

// The words of the 8 lanes that own one pair of columns of K (lane % 4) of a fragment are the
// nibbles of 8 canonical words, 8 out features of one row each, turned around. Those words, by the
// nibble that they become: rows 2 pair + {0, 8} + {0, 1}, out features {0..7, 8..15}.
struct Corner {
  int k;
  int n;
};
constexpr Corner kCorners[8] = {{0, 0}, {0, 8}, {8, 0}, {8, 8}, {1, 0}, {1, 8}, {9, 0}, {9, 8}};

// Calls fn(first of the lanes' words in the record, corner of the canonical words) for every such
// group; lanes are 16 words apart.
template <typename Fn>
void ForEachLaneGroup(int64_t n0, int64_t k0, Fn fn) {
  for (int unit = 0; unit < kCodesBytes / kUnitBytes; ++unit) {
    for (int step = 0; step < 4; ++step) {
      for (int pair = 0; pair < 4; ++pair) {
        fn(unit * 128 + pair * 4 + step, n0 + unit / 2 * kRowTile,
           k0 + unit % 2 * kUnitK + step * 16 + 2 * pair);
      }
    }
  }
}

// The codes of weights of 0 in the last group, for columns [column, column + 8).
uint32_t ZeroCodes(const CanonicalWeight& w, int64_t column) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) word |= w.Zero(w.groups() - 1, column + i) << 4 * i;
  return word;
}

void PackCodes(const CanonicalWeight& w, int64_t n0, int64_t k0, uint8_t* record) {
  ForEachLaneGroup(n0, k0, [&](int first, int64_t n, int64_t k) {
    uint32_t words[8] = {};
    for (int i = 0; i < 8; ++i) {
      const int64_t row = k + kCorners[i].k, column = n + kCorners[i].n;
      if (column >= w.n) continue;
      if (row < w.k) {
        std::memcpy(&words[i], w.codes.data() + row * w.row_bytes() + column / 2, 4);
      } else {
        words[i] = ZeroCodes(w, column);
      }
    }
    TransposeNibbles(words);
    for (int r = 0; r < 8; ++r) std::memcpy(record + (first + 16 * r) * 4, &words[r], 4);
  });
}

void UnpackCodes(const uint8_t* record, int64_t n0, int64_t k0, CanonicalWeight* w) {
  ForEachLaneGroup(n0, k0, [&](int first, int64_t n, int64_t k) {
    uint32_t words[8];
    for (int r = 0; r < 8; ++r) std::memcpy(&words[r], record + (first + 16 * r) * 4, 4);
    TransposeNibbles(words);
    for (int i = 0; i < 8; ++i) {
      const int64_t row = k + kCorners[i].k, column = n + kCorners[i].n;
      if (row >= w->k || column >= w->n) continue;
      std::memcpy(w->codes.data() + row * w->row_bytes() + column / 2, &words[i], 4);
    }
  });
}

struct MetaPlace {
  int scale;  // bytes from the meta's start
  int zero;
  int zero_shift;
};

MetaPlace PlaceOf(int column) {
  const int tile = column / kRowTile, row = column % 8, upper = column % kRowTile / 8;
  return {tile * 32 + row * 4 + upper * 2, kMetaScalesBytes + tile * 8 + row, 4 * upper};
}

void PackMetas(const CanonicalWeight& w, int64_t n0, int64_t k0, int metas, uint8_t* out) {
  std::memset(out, 0, metas * kMetaBytes);
  for (int j = 0; j < metas; ++j) {
    const int64_t k = k0 + j * (kBlockK / metas);
    if (k >= w.k) break;
    const int64_t group = k / w.scheme.group_size;
    uint8_t* meta = out + j * kMetaBytes;
    for (int column = 0; column < std::min<int64_t>(kTileN, w.n - n0); ++column) {
      const MetaPlace place = PlaceOf(column);
      std::memcpy(meta + place.scale, w.scales.data() + 2 * (group * w.n + n0 + column), 2);
      meta[place.zero] |= w.Zero(group, n0 + column) << place.zero_shift;
    }
  }
}

void UnpackMetas(const uint8_t* in, int64_t n0, int64_t k0, int metas, CanonicalWeight* w) {
  for (int j = 0; j < metas; ++j) {
    const int64_t k = k0 + j * (kBlockK / metas);
    if (k >= w->k) break;
    const int64_t group = k / w->scheme.group_size;
    const uint8_t* meta = in + j * kMetaBytes;
    for (int column = 0; column < std::min<int64_t>(kTileN, w->n - n0); ++column) {
      const MetaPlace place = PlaceOf(column);
      const int64_t at = group * w->n + n0 + column;
      std::memcpy(w->scales.data() + 2 * at, meta + place.scale, 2);
      if (!w->zeros.empty()) w->zeros[at] = meta[place.zero] >> place.zero_shift & 0xf;
    }
  }
}

void Pack(const CanonicalWeight& w, ColumnRange columns, uint8_t* out) {
  const int metas = Metas({w.k, w.n, w.scheme});
  ForEachRecord(columns, w.k, [&](int64_t index, int64_t n0, int64_t k0) {
    uint8_t* record = out + index * RecordBytes(metas);
    PackCodes(w, n0, k0, record);
    PackMetas(w, n0, k0, metas, record + kCodesBytes);
  });
}

void Unpack(const uint8_t* in, CanonicalWeight* w) {
  const int metas = Metas({w->k, w->n, w->scheme});
  ForEachRecord({0, w->n}, w->k, [&](int64_t index, int64_t n0, int64_t k0) {
    const uint8_t* record = in + index * RecordBytes(metas);
    UnpackCodes(record, n0, k0, w);
    UnpackMetas(record + kCodesBytes, n0, k0, metas, w);
  });
}

}  // namespace

const Layout kMma16Layout = {"mma16", Refuses, Extent, Pack, Unpack};

}  // namespace awqd
