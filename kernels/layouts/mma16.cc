// Layout "mma16": records of 64 out features x 128 in features in tensor-core fragment order.
//
//   record            at ((n / 64) * BlocksK + k / 128) * RecordBytes
//     unit            (i, h) = (n % 64 / 16, k % 128 / 64) at (2 i + h) * UnitBytes
//       lane          (n % 8) * 4 + k % 8 / 2. Lane l of a warp owns row l / 4 and column pair
//                     l % 4 of every 8 x 8 quarter of a fragment
//       step          s = k % 64 / 16, a fragment of 16 x 16: pair p = n % 16 / 8 + 2 (k % 16 / 8)
//                     of a lane's two codes k % 2 = 0, 1
//     meta            j = k % 128 / (128 / metas), behind the codes at MetaBytes j
//       scale         16 bits: at (n % 64 / 16) * 32 + (n % 8) * 4 + (n % 16 / 8) * 2
//                     32 bits: at twice that
//       zero          4 bits: nibble n % 16 / 8 of byte 128 + (n % 64 / 16) * 8 + n % 8
//                     8 bits: byte 128 + (n % 64 / 16) * 16 + (n % 8) * 2 + n % 16 / 8
//                     real: 32 bits, 256 bytes behind the scale
//
// A lane's codes of a unit fill 32-bit words. The code of k % 2 = 1 lies 16 bits above that of
// k % 2 = 0, modulo 32 for 1 bit.
//
//   bits  words of a lane   word           bit of pair p at step s
//   8     8                 2 s + p % 2    8 (p / 2)
//   4     4                 s              4 p
//   2     2                 s / 2          8 (s % 2) + 2 p
//   1     1                 0              {2, 3, 10, 11}[s] + 2 p, modulo 32
//
// In a unit the words of lane 0 come first, then those of lane 1, and so on. For 8 bits words 0..3
// of all lanes come first, then words 4..7 of all. For 3 bits a unit has the lower two bits of all
// codes as codes of 2 bits, then the upper bits as codes of 1 bit. For 5, 6 and 7 bits it has the
// lower four bits as codes of 4 bits, then bits 4 and 5 (for 5 bits: bit 4), then for 7 bits bit 6.
// The words of these upper planes have bits for the bytes of 8-bit codes: with r = 2 s + p % 2,
//
//   bits  words of a lane   word           bit of pair p at step s
//   2     2                 r / 4          8 (p / 2) + 2 (r % 4)
//   1     1                 0              8 (p / 2) + r
//
// Padding decodes to 0. Along N (to 64) code, zero and scale are 0. Along K (to 128) codes are the
// zero points of the last group, because its meta serves them where a group is all of K. Constant
// zeros are stored like any other.
//
// Scales in records, by their type:
//
//   FP16          as they are. If an integer of the codes times a scale would pass FP16, the column
//                 is stored times a power of two too, as long as its smaller scales keep their bits
//   BF16, E8M0    times a power of two for each column, which brings its largest scale to
//                 [128, 256). Part::kOuter takes it back. That is exact while the column's scales
//                 lie within 24 octaves: BF16 has fewer significant bits than FP16
//   INT8, E4M3    as FP16, exactly
//   any           as FP32 for E4M3 codes, tables and real zeros. Columns may share a scale
//
// One scale per column that is not FP16, or belongs to 8-bit codes, is Part::kOuter itself. Records
// then have the scale 1, or none. Records without scales always have a Part::kOuter, of ones if
// need be.
//
// Worked places, for a weight of [256, 128] with FP16 scales and stored zeros, groups of 128 rows.
// Bits `part bits` of the code, scale or zero of element (k, n) begin at bit `bit` of byte `byte`
// of a section. tests/kernels/layout_specification_test.cc compares these lines with packed bytes.
//
//   bits    k    n  part   part bits  section  byte  bit
//      4    0    8  code         0-3  codes       0    4
//      4    8    0  code         0-3  codes       1    0
//      4    1    0  code         0-3  codes       2    0
//      4   16    0  code         0-3  codes       4    0
//      4    2    0  code         0-3  codes      16    0
//      4    0    1  code         0-3  codes      64    0
//      4   64    0  code         0-3  codes     512    0
//      4    0   16  code         0-3  codes    1024    0
//      4  128    0  code         0-3  codes    4256    0
//      4    0   64  code         0-3  codes    8512    0
//      4    0    8  scale       0-15  codes    4098    0
//      4    0   17  scale       0-15  codes    4132    0
//      4    0    8  zero         0-3  codes    4224    4
//      4    0   17  zero         0-3  codes    4233    0
//      8    0    8  code         0-7  codes       4    0
//      8    9    0  code         0-7  codes       3    0
//      8   32    1  code         0-7  codes     576    0
//      8    0    9  zero         0-7  codes    8323    0
//      2   16    0  code         0-1  codes       1    0
//      2   33    8  code         0-1  codes       6    2
//      3    0    8  code         0-1  codes       0    2
//      3    0    8  code         2-2  codes     256    4
//      1   16    0  code         0-0  codes       0    3
//      1   49    8  code         0-0  codes       3    5
//      5    0    8  code         0-3  codes       0    4
//      5   17    8  code         4-4  codes     514    3
//      6   33    8  code         4-5  codes     518    2
//      7   33    9  code         4-5  codes     550    2
//      7   33    9  code         6-6  codes     786    5
#include "kernels/layouts/mma16.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/float8.h"
#include "kernels/base/stream.h"
#include "kernels/exact.h"

namespace awqd {
namespace {

using namespace mma16;  // NOLINT: this file implements the geometry

// The largest scale of a column goes to [2^7, 2^8), or to [2^11, 2^12) for FP16 scales and codes of
// up to 4 bits. FP16 holds it times any integer of the codes.
int TopOctave(const QuantizationScheme& d) {
  return d.scale_dtype == DType::kFp16 && d.bits <= 4 ? 11 : 7;
}
// The number of octaves from there down to the smallest scale that keeps its bits: 8 bits in a
// denormal of 2^-17, or 11 in a normal number of 2^-14.
int MostOctaves(const QuantizationScheme& d) {
  return TopOctave(d) + (d.scale_dtype == DType::kFp16 ? 14 : 17);
}

bool PerColumn(const WeightShape& shape) { return shape.groups() == 1; }

bool HasFloatScales(const WeightShape& shape) { return mma16::HasFloatScales(MetaKindOf(shape)); }

// Whether Part::kOuter is the whole scale.
bool ScaleIsOuter(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  if (!d.scale_dtype || !PerColumn(shape) || d.real_zeros()) return false;
  return d.bits == 8 || *d.scale_dtype != DType::kFp16;
}

bool IsNormalised(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  if (d.scale_dtype == DType::kFp16) {
    return shape.large_scales && !ScaleIsOuter(shape) && !HasFloatScales(shape);
  }
  return (d.scale_dtype == DType::kBf16 || d.scale_dtype == DType::kE8m0) && !PerColumn(shape) &&
         !HasFloatScales(shape);
}

// Whether Part::kOuter is 1 everywhere; rows of bare records always multiply by it.
bool OuterIsOnes(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  return HasBareRecords(shape) && !d.scale_dtype && d.outer == OuterKind::kNone;
}

bool MovesScales(const WeightShape& shape) {
  return ScaleIsOuter(shape) || IsNormalised(shape) || OuterIsOnes(shape);
}

// Whether records hold scales of this type exactly as FP16.
bool FitsFp16(const QuantizationScheme& d) {
  switch (*d.scale_dtype) {
    case DType::kFp16:
    case DType::kBf16:  // normalised
      return true;
    case DType::kInt8:  // (code - zero) * scale is exact too
      return d.is_integer() && d.bits <= 4;
    case DType::kE4m3:
    case DType::kE8m0:  // normalised
      return d.code == CodeKind::kE2m1;
    default:
      return false;
  }
}

std::string RefusesScales(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  if (d.block_cols != 1 && d.scale_dtype && !HasFloatScales(shape)) {
    return "holds a scale for each column";
  }
  if (MovesScales(shape) && d.outer != OuterKind::kNone) {
    return "holds no outer scale beside these scales";
  }
  if (!d.scale_dtype || ScaleIsOuter(shape) || HasFloatScales(shape)) return "";
  if (!FitsFp16(d)) {
    return absl::StrCat(
        "holds scales of groups in FP16 and BF16, of up to 4 bits in INT8, of E2M1 "
        "in E4M3 and E8M0, got ",
        Name(*d.scale_dtype));
  }
  if (IsNormalised(shape) && shape.scale_octaves > MostOctaves(d)) {
    return absl::StrCat("holds ", Name(*d.scale_dtype), " scales of a column within ",
                        MostOctaves(d), " octaves, got ", shape.scale_octaves);
  }
  return "";
}

std::string RefusesRealZeros(const WeightShape& shape) {
  const int rows = RealZerosRows(shape.scheme.bits);
  if (shape.groups() == 1 || shape.group_rows() % rows == 0) return "";
  return absl::StrCat("holds real zeros or FP32 scales of multiples of ", rows, " rows, got ",
                      shape.group_rows());
}

std::string Refuses(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  if (d.rows_of_code() > 1) return "holds codes of single elements";
  if (d.real_zeros() && !d.is_integer()) return "holds real zeros of integer codes";
  if (!d.is_integer() && (d.zero_kind != ZeroKind::kConstant || d.zero != 0)) {
    return "holds no zeros of codes that are no integers";
  }
  if (d.zero_kind == ZeroKind::kConstant && d.zero >= 1 << d.bits) {
    return absl::StrCat("holds zeros of as many bits as codes, got ", d.zero);
  }
  if (shape.group_rows() != shape.k && shape.group_rows() % kRowTile != 0) {
    return absl::StrCat("group size ", shape.group_rows(), " is neither K nor a multiple of ",
                        kRowTile);
  }
  return HasRealZeros(shape) ? RefusesRealZeros(shape) : RefusesScales(shape);
}

void AddSections(const WeightShape& shape, Sections* sections) {
  // Scales and zeros lie beside the codes that they decode, so there is one section.
  sections->Add(Part::kCodes, TilesN(shape.n) * BlocksK(shape.k) * RecordBytes(shape));
}

// --- Scales ---

// The largest magnitude of each column's scales, finite ones of FP16 alone.
std::vector<float> LargestScales(const HostWeight& w, ColumnRange columns) {
  const DType dtype = *w.scheme.scale_dtype;
  const int64_t count = columns.end - columns.begin;
  std::vector<float> out(count);
  if (dtype == DType::kE8m0) {
    for (int64_t g = 0; g < w.groups(); ++g) {  // as they lie in memory
      for (int64_t i = 0; i < count; ++i) {
        out[i] = std::max(out[i], w.Scale(g, columns.begin + i));
      }
    }
    return out;
  }
  // FP16 and BF16, one for each column: IsNormalised and RefusesScales admit no others.
  const int16_t last = dtype == DType::kFp16 ? 0x7bff : 0x7f80;
  // Magnitudes are in the order of their bits. Signed, because SSE2 compares such.
  std::vector<int16_t> most(count);
  for (int64_t g = 0; g < w.groups(); ++g) {
    const uint8_t* const from = w.scales.data() + 2 * w.Cell(g, columns.begin);
    for (int64_t i = 0; i < count; ++i) {
      int16_t bits;
      std::memcpy(&bits, from + 2 * i, sizeof(bits));
      bits &= 0x7fff;
      most[i] = std::max(most[i], bits <= last ? bits : int16_t{0});
    }
  }
  for (int64_t i = 0; i < count; ++i) out[i] = LoadElement(most.data(), dtype, i);
  return out;
}

// The power of two by which the scales of each column in [begin, end) are multiplied.
std::vector<float> Normalisers(const HostWeight& w, ColumnRange columns) {
  std::vector<float> out(columns.end - columns.begin, 1.0f);
  WeightShape shape = w.shape();
  const bool half = w.scheme.scale_dtype == DType::kFp16;
  shape.large_scales = half;  // each column is checked below
  if (!IsNormalised(shape)) return out;
  const std::vector<float> most = LargestScales(w, columns);
  for (size_t i = 0; i < out.size(); ++i) {
    if (most[i] == 0 || (half && !PassesHalf(w.scheme, most[i]))) continue;
    out[i] = std::ldexp(1.0f, TopOctave(w.scheme) - std::ilogb(most[i]));
  }
  return out;
}

void MovedScales(const HostWeight& w, float* out) {
  if (ScaleIsOuter(w.shape()) || OuterIsOnes(w.shape())) {
    for (int64_t n = 0; n < w.n; ++n) out[n] = w.Scale(0, n);  // 1 without scales
    return;
  }
  const std::vector<float> factors = Normalisers(w, {0, w.n});
  for (int64_t n = 0; n < w.n; ++n) out[n] = 1.0f / factors[n];
}

// --- Records ---

// Calls fn(record index, first n, first k) for every record of some columns. Rows are the outer
// loop, because neighbours share the cache lines of the codes.
template <typename Fn>
void ForEachRecord(ColumnRange columns, int64_t k, Fn fn) {
  for (int64_t block = 0; block < BlocksK(k); ++block) {
    for (int64_t tile = columns.begin / kTileN; tile < TilesN(columns.end); ++tile) {
      fn(tile * BlocksK(k) + block, tile * kTileN, block * kBlockK);
    }
  }
}

// --- Metas ---

struct MetaPlace {
  int scale;  // bytes from the meta's start
  int zero;
  int zero_shift;  // for integers
};

MetaPlace PlaceOf(int bits, MetaKind kind, int column) {
  const int tile = column / kRowTile, row = column % 8, upper = column % kRowTile / 8;
  const int scale = tile * 32 + row * 4 + upper * 2;
  if (HasFloatScales(kind)) return {2 * scale, 2 * (kMetaScalesBytes + scale), 0};
  if (kind == MetaKind::kHalfScales) return {scale, 0, 0};
  if (ZeroBits(bits) == 8) return {scale, kMetaScalesBytes + tile * 16 + row * 2 + upper, 0};
  return {scale, kMetaScalesBytes + tile * 8 + row, 4 * upper};
}

using MetaPlaces = std::array<MetaPlace, kTileN>;

MetaPlaces PlacesOf(const HostWeight& w) {
  MetaPlaces out;
  const MetaKind kind = MetaKindOf(w.shape());
  for (int column = 0; column < kTileN; ++column) {
    out[column] = PlaceOf(w.scheme.bits, kind, column);
  }
  return out;
}

// Columns 0..7 and 8..15 of every 16 of a record in turn.
template <int kBytes>
void InterleaveHalves(const uint8_t* from, uint8_t* to) {
  for (int tile = 0; tile < kTileN; tile += kRowTile) {
    for (int row = 0; row < 8; ++row) {
      for (int upper = 0; upper < 2; ++upper, to += kBytes) {
        std::memcpy(to, from + (tile + 8 * upper + row) * kBytes, kBytes);
      }
    }
  }
}

// The scales and zeros of a group in the types of records, by column; 0 past the last one.
class GroupCells {
 public:
  // Normalisers(w, columns). It outlives this.
  GroupCells(const HostWeight& w, ColumnRange columns, const std::vector<float>& normalisers)
      : w_(w),
        columns_(columns),
        normalisers_(normalisers),
        one_(!w.scheme.scale_dtype || ScaleIsOuter(w.shape())),
        wide_(HasFloatScales(w.shape())),
        real_zeros_(HasRealZeros(w.shape())),
        as_stored_(w.scheme.scale_dtype == DType::kFp16 && w.scheme.block_cols == 1 &&
                   std::count(normalisers.begin(), normalisers.end(), 1.0f) ==
                       static_cast<int64_t>(normalisers.size())) {
    const int64_t count = RoundUp(columns.end - columns.begin, kTileN);
    scales_.resize(count * (wide_ ? 4 : 2));
    zeros_.resize(real_zeros_ ? count * 4 : w.scheme.is_integer() ? count : 0);
  }

  void LoadGroup(int64_t group) {
    if (group == group_) return;
    group_ = group;
    LoadScales();
    LoadZeros();
  }

  // Writes the meta of the record whose first column is n0.
  void StoreMeta(int64_t n0, uint8_t* meta) const {
    const uint8_t* const scales = scales_.data() + (n0 - columns_.begin) * (wide_ ? 4 : 2);
    wide_ ? InterleaveHalves<4>(scales, meta) : InterleaveHalves<2>(scales, meta);
    if (zeros_.empty()) return;
    const uint8_t* const zeros = zeros_.data() + (n0 - columns_.begin) * (real_zeros_ ? 4 : 1);
    uint8_t* const to = meta + (wide_ ? 2 : 1) * kMetaScalesBytes;
    if (real_zeros_) return InterleaveHalves<4>(zeros, to);
    if (ZeroBits(w_.scheme.bits) == 8) return InterleaveHalves<1>(zeros, to);
    for (int i = 0; i < kTileN / 2; ++i) {
      const uint8_t* const from = zeros + i / 8 * kRowTile + i % 8;
      to[i] = static_cast<uint8_t>(from[0] | from[8] << 4);
    }
  }

 private:
  void LoadScales() {
    const int64_t count = columns_.end - columns_.begin;
    if (as_stored_ && !one_ && !wide_) {
      std::memcpy(scales_.data(), w_.scales.data() + 2 * w_.Cell(group_, columns_.begin),
                  2 * count);
      return;
    }
    // RefusesScales lets only one scale for each column pass here.
    if (w_.scheme.scale_dtype == DType::kBf16 && !one_ && !wide_) {
      const uint8_t* const from = w_.scales.data() + 2 * w_.Cell(group_, columns_.begin);
      for (int64_t i = 0; i < count; ++i) {
        const float scale = LoadElement(from, DType::kBf16, i);
        const uint16_t half = FloatToHalf(scale * normalisers_[i]);
        std::memcpy(scales_.data() + 2 * i, &half, sizeof(half));
      }
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      const float scale = one_ ? 1.0f : w_.Scale(group_, columns_.begin + i);
      const uint16_t half = HalfAt(i, scale);
      wide_ ? std::memcpy(scales_.data() + 4 * i, &scale, 4)
            : std::memcpy(scales_.data() + 2 * i, &half, 2);
    }
  }

  void LoadZeros() {
    if (zeros_.empty()) return;
    for (int64_t i = 0; i < columns_.end - columns_.begin; ++i) {
      const int64_t n = columns_.begin + i;
      if (!real_zeros_) {
        zeros_[i] = static_cast<uint8_t>(w_.Zero(group_, n));
        continue;
      }
      const float zero = w_.scheme.real_zeros() ? w_.RealZero(group_, n) : w_.Zero(group_, n);
      std::memcpy(zeros_.data() + 4 * i, &zero, 4);
    }
  }

  // Copies the bits of what is not moved, so that a NaN keeps them.
  uint16_t HalfAt(int64_t i, float scale) const {
    if (one_ || w_.scheme.scale_dtype != DType::kFp16 || normalisers_[i] != 1) {
      return FloatToHalf(scale * normalisers_[i]);
    }
    uint16_t bits;
    std::memcpy(&bits, w_.scales.data() + 2 * w_.Cell(group_, columns_.begin + i), 2);
    return bits;
  }

  const HostWeight& w_;
  const ColumnRange columns_;
  const std::vector<float>& normalisers_;
  const bool one_, wide_, real_zeros_, as_stored_;
  int64_t group_ = -1;
  std::vector<uint8_t> scales_, zeros_;
};

// Calls fn(first byte of the meta, place in it, group, column) for every scale of a record.
template <typename Fn>
void ForEachCell(const HostWeight& w, const MetaPlaces& places, int64_t n0, int64_t k0, int metas,
                 Fn fn) {
  const int bytes = MetaBytes(w.scheme.bits, MetaKindOf(w.shape()));
  for (int j = 0; j < metas; ++j) {
    const int64_t k = k0 + j * (kBlockK / metas);
    if (k >= w.k) break;
    const int64_t group = k / w.group_rows();
    for (int column = 0; column < std::min<int64_t>(kTileN, w.n - n0); ++column) {
      fn(j * bytes, places[column], group, n0 + column);
    }
  }
}

// The byte that encodes `value` in an 8-bit type.
uint8_t ByteOf(DType dtype, float value) {
  if (dtype == DType::kInt8) return static_cast<uint8_t>(static_cast<int8_t>(value));
  for (int byte = 0; byte < 256; ++byte) {
    const uint8_t at = static_cast<uint8_t>(byte);
    const float stands_for = dtype == DType::kE4m3 ? E4m3ToFloat(at) : E8m0ToFloat(at);
    if (std::bit_cast<uint32_t>(stands_for) == std::bit_cast<uint32_t>(value)) return at;
  }
  return 0x7f | (std::signbit(value) ? 0x80 : 0);  // NaN in E4M3
}

// Restores the stored scale from a record and Part::kOuter.
void RestoreScale(HostWeight* w, int64_t group, int64_t column, uint32_t record, float outer) {
  const WeightShape shape = w->shape();
  const int64_t cell = w->Cell(group, column);
  const DType dtype = *w->scheme.scale_dtype;
  const float in_record = HasFloatScales(shape) ? std::bit_cast<float>(record)
                                                : HalfToFloat(static_cast<uint16_t>(record));
  const bool half = dtype == DType::kFp16 && !ScaleIsOuter(shape) && !HasFloatScales(shape);
  // If an FP16 scale was not moved, `outer` is the scheme's own or none.
  const bool moved = half ? w->scheme.outer == OuterKind::kNone && outer != 1 : IsNormalised(shape);
  const float scale = ScaleIsOuter(shape) ? outer : moved ? in_record * outer : in_record;
  if (SizeOf(dtype) == 1) {
    w->scales[cell] = ByteOf(dtype, scale);
  } else if (half && !moved) {
    // Copies the bits, so that a NaN keeps them.
    std::memcpy(w->scales.data() + 2 * cell, &record, 2);
  } else {
    StoreElement(w->scales.data(), dtype, cell, scale);
  }
}

void UnpackMetas(const uint8_t* in, const MetaPlaces& places, int64_t n0, int64_t k0, int metas,
                 const float* outer, HostWeight* w) {
  const int mask = (1 << ZeroBits(w->scheme.bits)) - 1;
  const int scale_bytes = HasFloatScales(w->shape()) ? 4 : 2;
  ForEachCell(*w, places, n0, k0, metas, [&](int first, MetaPlace place, int64_t group, int64_t n) {
    uint32_t scale = 0;
    std::memcpy(&scale, in + first + place.scale, scale_bytes);
    if (!w->scales.empty()) RestoreScale(w, group, n, scale, outer == nullptr ? 1 : outer[n]);
    if (w->zeros.empty()) return;
    if (!HasRealZeros(w->shape())) {
      w->zeros[w->Cell(group, n)] = in[first + place.zero] >> place.zero_shift & mask;
      return;
    }
    float zero = 0;
    std::memcpy(&zero, in + first + place.zero, sizeof zero);
    if (w->scheme.real_zeros()) {
      StoreElement(w->zeros.data(), w->scheme.zero_dtype, w->Cell(group, n), zero);
    } else {
      w->zeros[w->Cell(group, n)] = static_cast<uint8_t>(zero);
    }
  });
}

// --- Both ---

void Pack(const HostWeight& w, ColumnRange columns, const Sections& sections, uint8_t* out) {
  const WeightShape shape = w.shape();
  const std::vector<float> normalisers = Normalisers(w, columns);
  const int metas = MetasPerRecord(shape), codes = CodesBytes(w.scheme.bits);
  const int bytes = RecordBytes(shape), meta_bytes = MetaBytes(w.scheme.bits, MetaKindOf(shape));
  std::vector<GroupCells> groups(metas, GroupCells(w, columns, normalisers));
  uint8_t* const records = out + sections.offset(Part::kCodes);
  alignas(64) uint8_t record[kMostRecordBytes];
  ForEachRecord(columns, w.k, [&](int64_t index, int64_t n0, int64_t k0) {
    PackCodes(w, n0, k0, record);
    uint8_t* meta = record + codes;
    for (int j = 0; j < metas; ++j, meta += meta_bytes) {
      const int64_t k = k0 + j * (kBlockK / metas);
      if (k >= w.k) {
        std::memset(meta, 0, meta_bytes);
        continue;
      }
      groups[j].LoadGroup(k / w.group_rows());
      groups[j].StoreMeta(n0, meta);
    }
    StreamBytes(record, records + index * bytes, bytes);
  });
  FinishStreams();
}

void Unpack(const WeightShape& shape, const uint8_t* in, const Sections& sections, HostWeight* w) {
  const int metas = MetasPerRecord(shape);
  const int bytes = RecordBytes(shape), codes = CodesBytes(shape.scheme.bits);
  const uint8_t* const records = in + sections.offset(Part::kCodes);
  const float* outer = sections.Has(Part::kOuter)
                           ? reinterpret_cast<const float*>(in + sections.offset(Part::kOuter))
                           : nullptr;
  const MetaPlaces places = PlacesOf(*w);
  ForEachRecord({0, w->n}, w->k, [&](int64_t index, int64_t n0, int64_t k0) {
    const uint8_t* record = records + index * bytes;
    UnpackCodes(record, n0, k0, w);
    UnpackMetas(record + codes, places, n0, k0, metas, outer, w);
  });
  if (metas > 0 || w->scales.empty()) return;
  for (int64_t n = 0; n < w->n; ++n) RestoreScale(w, 0, n, 0, outer[n]);
}

}  // namespace

const Layout kMma16Layout = {"mma16", Refuses, AddSections, Pack, Unpack, MovesScales, MovedScales};

}  // namespace awqd
