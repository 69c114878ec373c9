// Rows of INT8 activations by codes of 4 and 8 bits on Hopper's tensor cores. The kernel is that of
// sm90a/qmatmul_a16, with INT8 operands (integer_consumer.cuh). Codes are made signed as they are
// decoded, so that one product of bytes has both the code and its zero.
//
// sm90a/qmatmul_a8: y = x @ (code - zero), exact modulo 2^32.
// sm90a/qmatmul_a8_scaled: quantised activations, y = a (q @ W) + bias with INT8 q and a scale a
// for each token.
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
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
  if (mma16::HasBareRecords(shape) && !SumsStayIntegers(shape)) {
    return absl::StrCat("got K ", shape.k, ", for which sums pass INT32");
  }
  return RefusesRecords(shape, 1);
}

Claims ClaimsOfExact() {
  Claims out = Mma16ClaimsOfBits(kFourBits | kEightBits);
  out.scales = 0;
  return out;
}

}  // namespace

const KernelRow& PersistentA8Row() {
  static const KernelRow row = [] {
    KernelRow out = PersistentA8ScaledRow();
    out.name = "sm90a/qmatmul_a8";
    out.op = Op::kIntegerMatmul;
    out.claims = ClaimsOfExact();
    out.inputs = MaskOf(DType::kInt8);
    out.outputs = MaskOf(DType::kInt32);
    out.batch_invariant = true;
    return out;
  }();
  return row;
}

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
