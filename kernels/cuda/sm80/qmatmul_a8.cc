// Rows of INT8 activations. The kernel is that of sm80/qmatmul_a16, with INT8 fragments
// (integer_consumer.cuh), for every number of tokens and every width of codes that layout mma16
// holds.
//
// sm80/qmatmul_a8: y = x @ (code - zero), exact in INT32. Sums count modulo 2^32, so any zero of
// any group is exact, and so is adding in any order. Limits: those of the layout, and of INT32
// (WhyNoIntegers).
//
// sm80/qmatmul_a8_scaled: quantised activations, y = a (q @ W) + bias with INT8 q and a scale a for
// each token.
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

std::string DescribeInt8Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return DescribeMatmulTile(ChooseMatmulTile(shape, m, device, DType::kInt8));
}

}  // namespace

const KernelRow& QMatmulA8() {
  static const KernelRow row = {
      .name = "sm80/qmatmul_a8",
      .op = Op::kIntegerMatmul,
      .device = DeviceKind::kCuda,
      .claims = IntegerClaims(),
      .input_form = InputForm::kTensorCoreIntegers,
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

const KernelRow& QMatmulA8Scaled() {
  static const KernelRow row = [] {
    KernelRow out = QMatmulA8();
    out.name = "sm80/qmatmul_a8_scaled";
    out.op = Op::kQuantizedActivations;
    out.claims = Mma16ClaimsOfIntegers();
    out.inputs = kFloatingMask | MaskOf(DType::kInt8);
    out.outputs = kFloatingMask;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
