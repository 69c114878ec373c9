// The list of rows of kernels/cuda/sm80/.
#include "kernels/cuda/sm80/backend.h"

#include "kernels/cuda/sm80/rows.h"

namespace awqd {

absl::Span<const KernelRow* const> Sm80Kernels() {
  static const KernelRow* const rows[] = {
      &cuda::QMatmulA16(),         &cuda::ScaledSumsA16(),     &cuda::QMatmulA8(),
      &cuda::QMatmulA8Scaled(),    &cuda::QMatmulGrouped(),    &cuda::DequantizeRow(),
      &cuda::PlainMatmulRow(),     &cuda::PlainQMatmulA8Row(), &cuda::PlainQMatmulA8ScaledRow(),
      &cuda::PlainDequantizeRow(),
  };
  return rows;
}

}  // namespace awqd
