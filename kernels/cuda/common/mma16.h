// What the rows of layout "mma16" have in common on the host's side.
#pragma once

#include "kernels/layouts/mma16.h"
#include "kernels/registry.h"

namespace awqd::cuda {

// Records without scales decode to bf16 as 64ths of integers (dequant.cuh): what their sums are
// still to be multiplied by.
inline constexpr float kBareUnitBf16 = 64;

// E4M3 decodes to FP16 as 256ths (float_codes.cuh).
inline constexpr float kE4m3UnitFp16 = 256;

// What sums of bare records are to be multiplied by beside the scale.
inline float UnitOfBare(CodeKind code, DType x) {
  if (code == CodeKind::kE4m3) return x == DType::kFp16 ? kE4m3UnitFp16 : 1;
  return x == DType::kBf16 ? kBareUnitBf16 : 1;
}

// What the layout does not hold it refuses. Integer codes.
inline Claims Mma16Claims() {
  return {.bits = 1u << 1 | 1u << 2 | 1u << 3 | 1u << 4 | 1u << 8,
          .scales = kFloatingMask | MaskOf(DType::kInt8),
          .group_multiple = mma16::kRowTile,
          .column_blocks = false};
}

// Those, and real zeros.
inline Claims Mma16ClaimsOfIntegers() {
  Claims out = Mma16Claims();
  out.zeros |= kRealZeros;
  out.column_blocks = true;
  return out;
}

// Those, and all codes that are no integers.
inline Claims Mma16ClaimsOfAnyCode() {
  Claims out = Mma16ClaimsOfIntegers();
  out.codes |= MaskOf(CodeKind::kE2m1) | MaskOf(CodeKind::kE4m3) | MaskOf(CodeKind::kTable);
  out.scales |= MaskOf(DType::kE4m3) | MaskOf(DType::kE8m0);
  return out;
}

}  // namespace awqd::cuda
