// dense/matmul_fp16: dense/matmul_a16 for GPUs before compute capability 8.0, which have no BF16
// arithmetic that cuBLASLt could use. Products of BF16 activations go through the fused rows there,
// whatever their tokens.
#include "kernels/cuda/dense/matmul_a16.h"

namespace awqd {
namespace {

KernelRow Row() {
  KernelRow row = dense::MatmulRow();
  row.name = "dense/matmul_fp16";
  row.inputs = MaskOf(DType::kFp16) | MaskOf(DType::kFp32);
  row.min_arch = 75;
  row.max_arch = 79;
  return row;
}

}  // namespace

const KernelRow kDenseMatmulFp16 = Row();

}  // namespace awqd
