// Row sm80/qmatmul_a8: y = x @ (code - zero) of INT8 activations, exact in INT32.
//
// The kernel is that of sm80/qmatmul_a16, with INT8 fragments whose sums are kept as they are
// (integer_consumer.cuh). They count modulo 2^32, so any zero of any group is exact, and so is
// adding in any order. Limits: those of the layout, and of INT32 (WhyNoIntegers).
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm80/qmatmul.h"
#include "kernels/cuda/sm80/rows.h"

namespace awqd::cuda {
namespace {

Claims IntegerClaims() {
  Claims out = Mma16Claims();
  out.scales = 0;
  return out;
}

}  // namespace

const KernelRow& QMatmulA8() {
  static const KernelRow row = {
      .name = "sm80/qmatmul_a8",
      .op = Op::kIntegerMatmul,
      .device = DeviceKind::kCuda,
      .claims = IntegerClaims(),
      .staged = Staged::kTensorCoreIntegers,
      .inputs = MaskOf(DType::kInt8),
      .outputs = MaskOf(DType::kInt32),
      .layout = &kMma16Layout,
      .min_arch = 75,
      .batch_invariant = true,
      .priority = 10,
      .tile = DescribeInt8Tile,
      .matmul = RunQMatmul,
  };
  return row;
}

}  // namespace awqd::cuda
