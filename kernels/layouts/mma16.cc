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
// Padding (N to 64, K to 128) has code, zero and scale 0 and so decodes to 0. Symmetric schemes
// store their zero point, 2^(bits-1), like any other.
#include "kernels/layouts/mma16.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

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

// Where the fragment element e of a lane's word comes from, relative to the fragment's corner.
struct Offset {
  int n;
  int k;
};

Offset ElementOffset(int lane, int e) {
  return {lane / 4 + 8 * (e / 2 % 2), lane % 4 * 2 + e % 2 + 8 * (e / 4)};
}

constexpr int kNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Calls fn(record index, first n, first k) for every record.
template <typename Fn>
void ForEachRecord(int64_t n, int64_t k, Fn fn) {
  int64_t index = 0;
  for (int64_t tile = 0; tile < TilesN(n); ++tile) {
    for (int64_t block = 0; block < BlocksK(k); ++block) {
      fn(index++, tile * kTileN, block * kBlockK);
    }
  }
}

// Calls fn(word, n, k) for every 32-bit word of a record's codes: its place among the record's
// words and the corner of its fragment.
template <typename Fn>
void ForEachWord(int64_t n0, int64_t k0, Fn fn) {
  for (int word = 0; word < kCodesBytes / 4; ++word) {
    const int step = word % 4;
    const int unit = word / 128;
    fn(word, n0 + unit / 2 * kRowTile, k0 + unit % 2 * kUnitK + step * 16);
  }
}

uint32_t PackWord(const CanonicalWeight& w, int lane, int64_t n0, int64_t k0) {
  uint32_t word = 0;
  for (int e = 0; e < 8; ++e) {
    const Offset at = ElementOffset(lane, e);
    if (n0 + at.n >= w.n || k0 + at.k >= w.k) continue;
    word |= static_cast<uint32_t>(w.Code(k0 + at.k, n0 + at.n)) << (4 * kNibble[e]);
  }
  return word;
}

void UnpackWord(uint32_t word, int lane, int64_t n0, int64_t k0, CanonicalWeight* w) {
  for (int e = 0; e < 8; ++e) {
    const Offset at = ElementOffset(lane, e);
    const int64_t n = n0 + at.n, k = k0 + at.k;
    if (n >= w->n || k >= w->k) continue;
    const uint8_t code = word >> (4 * kNibble[e]) & 0xf;
    uint8_t& byte = w->codes[k * w->row_bytes() + n / 2];
    byte = n % 2 == 0 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4;
  }
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

void Pack(const CanonicalWeight& w, uint8_t* out) {
  const int metas = Metas({w.k, w.n, w.scheme});
  ForEachRecord(w.n, w.k, [&](int64_t index, int64_t n0, int64_t k0) {
    uint8_t* record = out + index * RecordBytes(metas);
    ForEachWord(n0, k0, [&](int word, int64_t n, int64_t k) {
      const uint32_t packed = PackWord(w, word / 4 % 32, n, k);
      std::memcpy(record + 4 * word, &packed, 4);
    });
    PackMetas(w, n0, k0, metas, record + kCodesBytes);
  });
}

void Unpack(const uint8_t* in, CanonicalWeight* w) {
  const int metas = Metas({w->k, w->n, w->scheme});
  ForEachRecord(w->n, w->k, [&](int64_t index, int64_t n0, int64_t k0) {
    const uint8_t* record = in + index * RecordBytes(metas);
    ForEachWord(n0, k0, [&](int word, int64_t n, int64_t k) {
      uint32_t packed;
      std::memcpy(&packed, record + 4 * word, 4);
      UnpackWord(packed, word / 4 % 32, n, k, w);
    });
    UnpackMetas(record + kCodesBytes, n0, k0, metas, w);
  });
}

}  // namespace

const Layout kMma16Layout = {"mma16", Refuses, Extent, Pack, Unpack};

}  // namespace awqd
