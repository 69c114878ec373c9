// Checks of E2M1's tensors.
#include "kernels/formats/e2m1.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/formats/codes.h"
#include "kernels/formats/tensors.h"

namespace awqd {

absl::StatusOr<HostWeight> DecodeE2m1(const E2m1Tensors& names, const LinearTensors& tensors) {
  AWQD_ASSIGN_OR_RETURN(const TensorView* codes, NeedTensor(tensors, names.codes, "U8 [N, K/2]"));
  AWQD_ASSIGN_OR_RETURN(const TensorView* scale,
                        NeedTensor(tensors, names.scales,
                                   absl::StrCat(names.scale == DType::kE4m3 ? "F8_E4M3" : "U8",
                                                " [N, K/group_size]")));
  AWQD_RETURN_IF_ERROR(CheckTensor(names.codes, *codes, {"U8"}, 2));
  AWQD_RETURN_IF_ERROR(CheckByteScales(names.scales, *scale, names.scale, 2));
  HostWeight out;
  out.n = codes->shape[0];
  out.k = codes->shape[1] * 2;  // as many bytes as the shape says: doubled it fits
  const int64_t groups = scale->shape[1];
  AWQD_ASSIGN_OR_RETURN(const int64_t rows,
                        GroupRows(names.group_size, out.k, groups, names.scales, false));
  AWQD_RETURN_IF_ERROR(CheckShape(names.scales, *scale, {out.n, groups}, "[N, K/group_size]"));
  out.description = {.code = CodeKind::kE2m1,
                     .block_rows = BlockRows(rows, out.k),
                     .zero_kind = ZeroKind::kConstant,
                     .scale_dtype = names.scale};
  out.scales = Transposed(scale->bytes, out.n, groups, 1);
  if (codes->unread()) return out;
  out.codes = TransposedNibbles(codes->bytes, out.n, out.k, FirstNibble::kLow);
  return out;
}

}  // namespace awqd
