// The rows of E4M3 activations on Hopper's tensor cores, of a weight and of a stack of experts: by
// E4M3 codes, and by the E2M1 codes of MXFP4, which become E4M3 exactly. The kernel is that of
// sm90a/qmatmul_a16, with operands of 8 bits (float8_consumer.cuh).
//
// y = sum over blocks of 128 of K of a * s * (q @ codes) + bias, for E4M3 q with a scale a for each
// token, or for each token and block.
#include <string>

#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/cuda/sm90a/rows.h"

namespace awqd::cuda {
namespace {

constexpr int64_t kLeastTokens = 33;
constexpr int64_t kLeastRows = 8;  // of an expert, on average

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return DescribeTile(shape, device, m, DType::kE4m3);
}

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  const std::string why = RefusesFloat8(shape);
  return why.empty() ? RefusesRecords(shape, kEveryMeta) : why;
}

}  // namespace

const KernelRow& PersistentFloat8Row() {
  static const KernelRow row = {
      .name = "sm90a/qmatmul_float8",
      .op = Op::kFloat8Activations,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .claims = kFloat8Claims,
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

const KernelRow& PersistentGroupedFloat8Row() {
  static const KernelRow row = {
      .name = "sm90a/qmatmul_float8_grouped",
      .op = Op::kGroupedFloat8,
      .device = DeviceKind::kCuda,
      .claims = kFloat8Claims,
      .input_form = InputForm::kTensorCoreFloat8,
      .layout = &kMma16Layout,
      .min_arch = 90,
      .max_arch = 90,
      .min_m = kLeastRows,
      .priority = 20,
      .refuses = Refuses,
      .workspace_bytes = WorkspaceOfSums,
      .grouped_table = GroupedFloat8Table,
      .grouped_tile = GroupedFloat8Tile,
      .grouped = RunGroupedProduct,
  };
  return row;
}

}  // namespace awqd::cuda
