// Row sm90a/qmatmul_a8_scaled: the product of quantised activations on Hopper's tensor cores, INT8
// by codes of 4 and 8 bits.
//
// The kernel is that of sm90a/qmatmul_a16, with INT8 operands (integer_consumer.cuh). Codes are
// made signed as they are decoded, so that one product of bytes has both the code and its zero.
#include <cstdint>
#include <string>

#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

constexpr int64_t kLeastTokens = 33;

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return DescribeTile(shape, device, m, DType::kInt8);
}

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  const QuantizationScheme& d = shape.scheme;
  if (d.bits == 8 && (d.zero_kind != ZeroKind::kConstant || d.zero != 128)) {
    return "zeros of 8-bit codes are not all 128";
  }
  return RefusesRecords(shape, 1);
}

}  // namespace

const KernelRow& PersistentA8ScaledRow() {
  static const KernelRow row = {
      .name = "sm90a/qmatmul_a8_scaled",
      .op = Op::kQuantizedActivations,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .claims = Mma16ClaimsOfBits(kFourBits | kEightBits),
      .input_form = InputForm::kTensorCoreIntegers,
      .inputs = kFloatingMask | MaskOf(DType::kInt8),
      .layout = &kMma16Layout,
      .min_arch = 90,
      .max_arch = 90,
      .min_m = kLeastTokens,
      .priority = 20,
      .refuses = Refuses,
      .tile = Tile,
      .workspace_bytes = WorkspaceOfSums,
      .matmul = RunProduct,
  };
  return row;
}

}  // namespace awqd::cuda
