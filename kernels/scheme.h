// QuantizationScheme: the arithmetic that is left once a checkpoint format has been decoded.
//
//   W[k, n] = (decode(code[i, n]) - zero[i / gk, n / gn]) * scale[i / gk, n / gn] * outer[n]
//
// The scheme says nothing of activations, because their treatment belongs to the operation.
// Nor does it say whether a weight has an order, a factor or a bias: every kernel serves those
// (README.md, prologue and epilogue).
//
// Printed in the order of the formula (ToString):
//
//   code    w1 .. w8 (unsigned integers), e2m1, e4m3, t4 (4 bits into a table of 16), or the name of
//           a vector code (iq2_xxs, base/vector_codes.h), which has its scales in it; trellis1 ..
//           trellis8, or with mcg or mul1 behind them (base/trellis.h), which have none
//   block   g128 (128 x 1), c (K x 1, a scale per column), t (one for all), b128x128
//   zero    z stored, s 2^(bits-1), m5 the constant 5, r real before the scale, o real after it;
//           nothing: 0. Real ones other than FP16 say their type: r:bf16
//   scale   nothing: FP16; else +bf16, +fp32, +e4m3, +e8m0, +int8, or +1 for none
//   outer   *c per column, *t one for all
//
// "w4g128z", "w8cs+fp32", "e2m1g16+e4m3*t".
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/trellis.h"
#include "kernels/base/vector_codes.h"
#include "kernels/types.h"

namespace awqd {

enum class CodeKind : uint8_t {
  kUnsigned,  // 0 .. 2^bits - 1. Signed codes become unsigned with a constant zero of 2^(bits-1)
  kE2m1,      // 4 bits: 0 0.5 1 1.5 2 3 4 6, and the same negative
  kE4m3,      // 8 bits, with NaN and without infinity
  kTable,     // 4 bits: an index into 16 FP32 values that come with the weight
  kVector,    // blocks of vector codes
  kTrellis,   // tiles of a trellis
};

enum class ZeroKind : uint8_t {
  kConstant,    // one for all: QuantizationScheme::zero
  kStored,      // an unsigned integer of the code's bits per block
  kRealBefore,  // a real number per block: (code - zero) * scale
  kRealAfter,   // a real number per block: code * scale - zero
};

enum class OuterKind : uint8_t { kNone, kOne, kColumn };

struct QuantizationScheme {
  CodeKind code = CodeKind::kUnsigned;
  VectorCode vector = VectorCode::kNone;     // of kVector
  TrellisCode trellis = TrellisCode::kNone;  // of kTrellis
  int bits = 4;            // of a code: 1..8; 4 for kE2m1 and kTable, 8 for kE4m3 and kVector
  int64_t block_rows = 0;  // gk; 0: all of K
  int64_t block_cols = 1;  // gn; 0: all of N
  ZeroKind zero_kind = ZeroKind::kStored;
  int zero = 0;                                     // of kConstant
  DType zero_dtype = DType::kFp16;                  // of the real kinds, as stored
  std::optional<DType> scale_dtype = DType::kFp16;  // as stored; none: 1
  OuterKind outer = OuterKind::kNone;

  bool symmetric() const { return zero_kind == ZeroKind::kConstant && zero == 1 << (bits - 1); }
  bool real_zeros() const {
    return zero_kind == ZeroKind::kRealBefore || zero_kind == ZeroKind::kRealAfter;
  }
  // Bytes of one stored scale; 0 without scales.
  int64_t scale_bytes() const { return scale_dtype ? SizeOf(*scale_dtype) : 0; }
  int64_t zero_bytes() const {
    if (zero_kind == ZeroKind::kConstant) return 0;
    return real_zeros() ? SizeOf(zero_dtype) : 1;
  }
  bool is_integer() const { return code == CodeKind::kUnsigned; }
  // Rows of K that a code of a HostWeight has. More than one: elements have no codes of their own.
  int64_t rows_of_code() const {
    if (code == CodeKind::kTrellis) return kTrellisTile;
    return code == CodeKind::kVector ? kVectorBlock : 1;
  }

  friend bool operator==(const QuantizationScheme&, const QuantizationScheme&) = default;
};

// 2^(bits-1), the zero of codes that were signed.
QuantizationScheme Symmetric(int bits, int64_t block_rows, DType scale = DType::kFp16);
// One stored zero and one scale per `block_rows` rows of a column.
QuantizationScheme Asymmetric(int bits, int64_t block_rows, DType scale = DType::kFp16);

// Vector codes: blocks of 256 rows of a column, without other scales and zeros.
QuantizationScheme Vectors(VectorCode code);

// A trellis of 1 to 8 bits. A block is 16 rows of the 128 columns that are transformed together.
QuantizationScheme Trellis(TrellisCode code, int bits);

// Bits that a code has in a HostWeight: the scheme's bits, rounded up to 2, 4 or 8.
constexpr int CodeBits(int bits) { return bits <= 2 ? 2 : bits <= 4 ? 4 : 8; }
// The same for any scheme; of vector codes those of a block, of a trellis those of a tile's column.
constexpr int CodeBits(const QuantizationScheme& d) {
  if (d.code == CodeKind::kTrellis) return kTrellisTile * d.bits;
  return d.code == CodeKind::kVector ? 8 * VectorBlockBytes(d.vector) : CodeBits(d.bits);
}

// Returns INVALID_ARGUMENT with the wrong part, the value got and the value expected. `k`, `n`: in
// and out features of the weight, at least 1.
absl::Status Validate(const QuantizationScheme& scheme, int64_t k, int64_t n);

std::string ToString(const QuantizationScheme& scheme);
// Inverse of ToString.
absl::StatusOr<QuantizationScheme> ParseScheme(absl::string_view text);

}  // namespace awqd
