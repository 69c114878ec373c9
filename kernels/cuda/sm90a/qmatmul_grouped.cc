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
constexpr int64_t kLeastRows = 17;

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  return RefusesRecords(shape, 1);
}

}  // namespace

const KernelRow& PersistentGroupedRow() {
  static const KernelRow row = [] {
    KernelRow out;
    out.name = "sm90a/qmatmul_grouped";
    out.op = Op::kGroupedMatmul;
    out.device = DeviceKind::kCuda;
    out.claims = ClaimsOfBits(kFourBits);
    out.staged = Staged::kTensorCore;
    out.layout = &kMma16Layout;
    out.min_arch = 90;
    out.max_arch = 90;
    out.min_m = kLeastRows;
    out.priority = 20;
    out.refuses = Refuses;
    out.workspace_bytes = WorkspaceOfSums;
    out.grouped_table = GroupedProductTable;
    out.grouped = RunGroupedProduct;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
