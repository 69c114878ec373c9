// The list of rows of kernels/cuda/dense/.
#include "kernels/cuda/dense/backend.h"

#include "kernels/cuda/dense/matmul_a16.h"

namespace awqd {

absl::Span<const KernelRow* const> DenseKernels() {
  static const KernelRow* const rows[] = {&kDenseMatmulA16, &kDenseMatmulFp16};
  return rows;
}

}  // namespace awqd
