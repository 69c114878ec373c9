// Rows of E4M3 activations on Hopper's tensor cores, by E4M3 codes and by integers of 4 bits whose
// zero points are 8, which E4M3 holds. The kernel is that of
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
// Products of 4-bit integers by 16 bits are faster before: 8192 x 8192 at 128 tokens 27 us, and 30
// with E4M3 (H200, 2026-11-30).
constexpr int64_t kLeastTokensOfIntegers = 256;

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return DescribeTile(shape, device, m, DType::kE4m3);
}

Claims ClaimsOf(CodeKind code) {
  const bool integers = code == CodeKind::kUnsigned;
  return {.codes = MaskOf(code),
          .bits = integers ? kFourBits : 0,
          .zeros = MaskOf(ZeroKind::kConstant),
          .scales = kFloatingMask | (integers ? 0 : MaskOf(DType::kE8m0)),
          .group_multiple = mma16::kBlockK,
          .column_blocks = !integers};
}

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  if (shape.scheme.is_integer() && shape.scheme.zero != 8) return "zeros of 4-bit codes are not 8";
  return RefusesRecords(shape, 1);
}

}  // namespace

const KernelRow& PersistentFloat8Row() {
  static const KernelRow row = {
      .name = "sm90a/qmatmul_float8",
      .op = Op::kFloat8Activations,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .claims = ClaimsOf(CodeKind::kE4m3),
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

const KernelRow& PersistentFloat8W4Row() {
  static const KernelRow row = [] {
    KernelRow out = PersistentFloat8Row();
    out.name = "sm90a/qmatmul_float8_w4";
    out.claims = ClaimsOf(CodeKind::kUnsigned);
    out.min_m = kLeastTokensOfIntegers;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
