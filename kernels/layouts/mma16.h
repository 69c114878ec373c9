// The geometry of layout "mma16", which kernels share with the packer.
//
// Weights are the A operand of m16n8k16 (rows = out features). The unit of storage is a record: 64
// out features x 128 in features, codes first, then what decodes them, so that one contiguous read
// brings all that a block needs for one step. Records follow each other along K, then along N.
// Integer codes, E2M1, E4M3 and indices of a table take their own width.
// mma16.cc specifies every bit, with worked places.
#pragma once

#include <cstdint>

#include "kernels/base/math.h"
#include "kernels/layouts/layout.h"

namespace awqd::mma16 {

inline constexpr int kTileN = 64;    // out features of a record
inline constexpr int kBlockK = 128;  // in features of a record
inline constexpr int kRowTile = 16;  // out features of a fragment
inline constexpr int kUnitK = 64;    // in features of a unit: four steps of 16

// A unit is the part that a warp reads at a time: 16 out features x 64 in features.
constexpr int UnitBytes(int bits) { return kRowTile * kUnitK * bits / 8; }
constexpr int CodesBytes(int bits) { return kTileN * kBlockK * bits / 8; }

// The content of a meta, for 64 columns each.
enum class MetaKind : uint8_t {
  kIntegerZeros,  // scales in FP16, then zeros: 4 bits for codes of up to 4 bits, else 8
  kHalfScales,    // E2M1: scales in FP16
  kFloatScales,   // E4M3 and tables: scales in FP32
  kRealZeros,     // integer codes, HasRealZeros: scales in FP32, then zeros in FP32
};
constexpr MetaKind MetaKindOf(CodeKind code, bool real_zeros) {
  if (real_zeros) return MetaKind::kRealZeros;
  if (code == CodeKind::kUnsigned) return MetaKind::kIntegerZeros;
  return code == CodeKind::kE2m1 ? MetaKind::kHalfScales : MetaKind::kFloatScales;
}
// Whether records hold zeros as real numbers: integer codes with real zeros, or with FP32 scales of
// groups, which FP16 does not hold. Integer zeros then count as taken off before the scale.
inline bool HasRealZeros(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  const bool groups = d.block_rows != 0 && d.block_rows < shape.k;
  return d.real_zeros() || (d.is_integer() && groups && d.scale_dtype == DType::kFp32);
}
// Their groups have a multiple of so many rows, unless one has all of K. 16 where GGUF has such.
constexpr int RealZerosRows(int bits) { return bits == 2 || bits == 3 || bits == 6 ? 16 : 32; }
inline bool TakesZeroFirst(const WeightShape& shape) {
  return shape.scheme.zero_kind != ZeroKind::kRealAfter;
}
inline MetaKind MetaKindOf(const WeightShape& shape) {
  return MetaKindOf(shape.scheme.code, HasRealZeros(shape));
}
constexpr bool HasFloatScales(MetaKind kind) {
  return kind == MetaKind::kFloatScales || kind == MetaKind::kRealZeros;
}

inline constexpr int kMetaScalesBytes = kTileN * 2;  // in FP16
constexpr int ZeroBits(int bits) { return bits <= 4 ? 4 : 8; }
constexpr int MetaBytes(int bits, MetaKind kind) {
  switch (kind) {
    case MetaKind::kIntegerZeros:
      return kMetaScalesBytes + kTileN * ZeroBits(bits) / 8;
    case MetaKind::kHalfScales:
      return kMetaScalesBytes;
    case MetaKind::kFloatScales:
      return 2 * kMetaScalesBytes;
    case MetaKind::kRealZeros:
      break;
  }
  return 4 * kMetaScalesBytes;
}

// Whether records hold no scales and no zeros: codes of 8 bits with one scale per column and the
// same zero everywhere. The scales are Part::kOuter then, and the zero is a kernel argument. Codes
// of fewer bits have no such records, which saves one kind of record to compile.
constexpr bool HasBareRecords(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  return d.bits == 8 && d.zero_kind == ZeroKind::kConstant &&
         (d.block_rows == 0 || d.block_rows == shape.k || !d.scale_dtype);
}

// Metas per record, 0, 1, 2, 4 or 8: each serves 128 / that many rows of K. The meta of a longer
// group is repeated, so that kernels never divide by the group size. Group sizes are multiples of
// 16, or K itself.
constexpr int MetasPerRecord(const WeightShape& shape) {
  if (HasBareRecords(shape)) return 0;
  const int64_t rows = shape.group_rows();
  if (rows == shape.k || rows % 128 == 0) return 1;
  if (rows % 64 == 0) return 2;
  return rows % 32 == 0 ? 4 : 8;
}

constexpr int RecordBytes(int bits, int metas, MetaKind kind = MetaKind::kIntegerZeros) {
  return CodesBytes(bits) + metas * MetaBytes(bits, kind);
}
// The longest has codes of 8 bits and 8 metas.
inline constexpr int kMostRecordBytes = RecordBytes(8, 8, MetaKind::kRealZeros);
inline int RecordBytes(const WeightShape& shape) {
  return RecordBytes(shape.scheme.bits, MetasPerRecord(shape), MetaKindOf(shape));
}
constexpr int64_t TilesN(int64_t n) { return CeilDiv(n, kTileN); }
constexpr int64_t BlocksK(int64_t k) { return CeilDiv(k, kBlockK); }

// Codes of 3, 5, 6 and 7 bits lie in planes: 2 + 1, 4 + 1, 4 + 2 and 4 + 2 + 1 bits, the lowest
// bits in the first. The width of a plane; 0 where there is none.
constexpr int PlaneBits(int bits, int plane) {
  const int first = bits == 3 ? 2 : bits < 5 || bits == 8 ? bits : 4;
  if (plane == 0) return first;
  const int rest = bits - first;
  if (plane == 1) return rest == 3 ? 2 : rest;
  return rest == 3 ? 1 : 0;
}
inline constexpr int kMostPlanes = 3;

// The place of a plane of a code in the codes of a record: bits [bit, bit + PlaneBits) of byte
// `byte`. `n` in [0, 64), `k` in [0, 128).
struct CodePlace {
  int byte = 0;
  int bit = 0;
};
CodePlace PlaceOfCode(int bits, int plane, int n, int k);

// Writes the CodesBytes of the record whose first code is that of column n0 and row k0, padding
// included. Only the packer needs it. UnpackCodes is its inverse.
void PackCodes(const HostWeight& weight, int64_t n0, int64_t k0, uint8_t* record);
void UnpackCodes(const uint8_t* record, int64_t n0, int64_t k0, HostWeight* weight);

}  // namespace awqd::mma16
