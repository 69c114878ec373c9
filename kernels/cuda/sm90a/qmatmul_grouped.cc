// Row sm90a/qmatmul_grouped: the products of a stack of experts by one kernel, that of
// sm90a/qmatmul_a16: its tiles are those of all experts, so that small ones fill the GPU together.
#include <cstdint>
#include <string>

#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

// Rows of an expert, on average. Below, sm80/qmatmul_grouped.
constexpr int64_t kLeastRows = 2;

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  std::string why = RefusesExperts(shape);
  return why.empty() ? RefusesCodes(shape) : why;
}

}  // namespace

const KernelRow& PersistentGroupedRow() {
  static const KernelRow row = {
      .name = "sm90a/qmatmul_grouped",
      .op = Op::kGroupedMatmul,
      .device = DeviceKind::kCuda,
      .claims = ClaimsOfExperts(),
      .input_form = InputForm::kTensorCore,
      .layout = &kMma16Layout,
      .min_arch = 90,
      .max_arch = 90,
      .min_m = kLeastRows,
      .priority = 20,
      .refuses = Refuses,
      .workspace_bytes = WorkspaceOfSums,
      .grouped_table = GroupedProductTable,
      .grouped = RunGroupedProduct,
  };
  return row;
}

}  // namespace awqd::cuda
