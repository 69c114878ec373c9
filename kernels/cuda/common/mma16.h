// Shared by the rows of layout "mma16" on the host's side: units of sums, claims, dispatch by bits.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/float_codes.cuh"
#include "kernels/layouts/mma16.h"
#include "kernels/registry.h"

namespace awqd::cuda {

// Records without scales decode to bf16 as 64ths of integers (dequant.cuh): the factor that their
// sums lack.
inline constexpr float kBareUnitBf16 = 64;

// E4M3 decodes to FP16 as 256ths (float_codes.cuh).
inline constexpr float kE4m3UnitFp16 = 256;

// The factor that sums of bare records lack beside the scale.
inline float UnitOfBare(CodeKind code, DType x) {
  if (code == CodeKind::kE4m3) return x == DType::kFp16 ? kE4m3UnitFp16 : 1;
  return x == DType::kBf16 ? kBareUnitBf16 : 1;
}

// Integer codes with integer zeros. The layout itself refuses what it does not hold.
inline Claims Mma16Claims() {
  return {.bits = kEverything.bits,
          .scales = kFloatingMask | MaskOf(DType::kInt8),
          .group_multiple = mma16::kRowTile,
          .column_blocks = false};
}

// The same for codes of these widths alone.
inline constexpr uint32_t kFourBits = 1u << 4, kFiveBits = 1u << 5, kSixBits = 1u << 6;
inline constexpr uint32_t kSevenBits = 1u << 7, kEightBits = 1u << 8;
inline Claims Mma16ClaimsOfBits(uint32_t bits) {
  Claims out = Mma16Claims();
  out.bits = bits;
  return out;
}

// All widths, and real zeros.
inline Claims Mma16ClaimsOfIntegers() {
  Claims out = Mma16Claims();
  out.zeros |= kRealZeros;
  out.column_blocks = true;
  return out;
}

// The same, and all codes that are no integers.
inline Claims Mma16ClaimsOfAnyCode() {
  Claims out = Mma16ClaimsOfIntegers();
  out.codes |= MaskOf(CodeKind::kE2m1) | MaskOf(CodeKind::kE4m3) | MaskOf(CodeKind::kTable);
  out.scales |= MaskOf(DType::kE4m3) | MaskOf(DType::kE8m0);
  return out;
}

// Products of E4M3 activations by tensor cores of E4M3.
inline constexpr int kGroupOfE2m1 = 32;
inline constexpr Claims kFloat8Claims = {.codes = MaskOf(CodeKind::kE4m3) | MaskOf(CodeKind::kE2m1),
                                         .zeros = MaskOf(ZeroKind::kConstant),
                                         .scales = kFloatingMask | MaskOf(DType::kE8m0),
                                         .group_multiple = kGroupOfE2m1,
                                         .column_blocks = true};
// E4M3 in columns or groups of multiples of 128, and E2M1 that becomes E4M3 exactly.
inline std::string RefusesFloat8(const WeightShape& shape) {
  if (shape.scheme.code != CodeKind::kE2m1) {
    if (mma16::MetasPerRecord(shape) <= 1) return "";
    return absl::StrCat("group size ", shape.group_rows(), " of E4M3 is no multiple of ",
                        mma16::kBlockK);
  }
  if (shape.scheme.scale_dtype != DType::kE8m0) return "takes E2M1 with scales of E8M0";
  if (shape.group_rows() != kGroupOfE2m1 || shape.k == kGroupOfE2m1) {
    return absl::StrCat("takes E2M1 in groups of ", kGroupOfE2m1, ", got ", shape.group_rows());
  }
  if (shape.scale_octaves <= kE2m1OctavesE4m3) return "";
  return absl::StrCat("takes E2M1 with scales of a column within ", kE2m1OctavesE4m3,
                      " octaves, which E4M3 holds beside the codes, got ", shape.scale_octaves);
}

// KernelRow::refuses of rows that read integer zeros and FP16 scales alone.
inline std::string RefusesRealZeros(const WeightShape& shape) {
  return mma16::HasRealZeros(shape) ? "takes no real zeros and no FP32 scales of groups" : "";
}

// Grouped products have kernels for the records of published mixtures of experts.
inline Claims ClaimsOfExperts() {
  Claims out = Mma16ClaimsOfAnyCode();
  out.bits = kFourBits | kFiveBits | kSixBits | kEightBits;
  out.codes &= ~MaskOf(CodeKind::kTable);
  return out;
}
inline std::string RefusesExperts(const WeightShape& shape) {
  const QuantizationScheme& d = shape.scheme;
  const int metas = mma16::MetasPerRecord(shape), bits = d.bits;
  const bool real = mma16::HasRealZeros(shape);
  const bool integers = real ? bits >= 4 && bits <= 6 : bits == 4 || (bits == 8 && metas <= 1);
  const bool floats = d.code == CodeKind::kE2m1 || metas <= 1;
  if (d.is_integer() ? integers : floats) return "";
  return absl::StrCat("has no kernel of grouped products for ", ToString(d));
}

// Calls fn.operator()<kBits>() for codes of `bits` bits.
template <class Fn>
absl::Status ForBits(int bits, Fn fn) {
  switch (bits) {
    case 1:
      return fn.template operator()<1>();
    case 2:
      return fn.template operator()<2>();
    case 3:
      return fn.template operator()<3>();
    case 4:
      return fn.template operator()<4>();
    case 5:
      return fn.template operator()<5>();
    case 6:
      return fn.template operator()<6>();
    case 7:
      return fn.template operator()<7>();
    default:
      return fn.template operator()<8>();
  }
}

// Calls fn.operator()<kType>() for FP16, BF16 or FP32.
template <class Fn>
absl::Status ForFloatingType(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::kFp16:
      return fn.template operator()<DType::kFp16>();
    case DType::kBf16:
      return fn.template operator()<DType::kBf16>();
    default:
      return fn.template operator()<DType::kFp32>();
  }
}

}  // namespace awqd::cuda
