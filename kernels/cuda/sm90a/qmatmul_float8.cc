// The row of E4M3 activations by E4M3 codes on Hopper's tensor cores. The kernel is that of
// sm90a/qmatmul_a16, with operands of 8 bits (float8_consumer.cuh).
//
// y = sum over blocks of 128 of K of a * s * (q @ codes) + bias, for E4M3 q with a scale a for each
// token, or for each token and block.
#include <string>

#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

constexpr int64_t kLeastTokens = 33;

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return DescribeTile(shape, device, m, DType::kE4m3);
}

Claims ClaimsOfE4m3() {
  return {.codes = MaskOf(CodeKind::kE4m3),
          .zeros = MaskOf(ZeroKind::kConstant),
          .scales = kFloatingMask | MaskOf(DType::kE8m0),
          .group_multiple = mma16::kBlockK,
          .column_blocks = true};
}

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  return RefusesRecords(shape, 1);
}

}  // namespace

const KernelRow& PersistentFloat8Row() {
  static const KernelRow row = {
      .name = "sm90a/qmatmul_float8",
      .op = Op::kFloat8Activations,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .claims = ClaimsOfE4m3(),
      .input_form = InputForm::kTensorCoreFloat8,
      .inputs = kFloatingMask,
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
