// Row sm80/qmatmul_a8_scaled: the product of quantised activations, y = a (q @ W) + bias of INT8 q
// and a scale a for each token, for every number of tokens and every width of codes that layout
// mma16 holds.
//
// The kernel is that of sm80/qmatmul_a16, with INT8 fragments (integer_consumer.cuh).
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm80/qmatmul.h"
#include "kernels/cuda/sm80/rows.h"

namespace awqd::cuda {

const KernelRow& QMatmulA8Scaled() {
  static const KernelRow row = {
      .name = "sm80/qmatmul_a8_scaled",
      .op = Op::kQuantizedActivations,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .claims = Mma16ClaimsOfIntegers(),
      .staged = Staged::kTensorCoreIntegers,
      .inputs = kFloatingMask | MaskOf(DType::kInt8),
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
