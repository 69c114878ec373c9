// Row sm90a/qmatmul_grouped: the products of a stack of experts by one kernel, that of
// sm90a/qmatmul_a16: its tiles are those of all experts, so that small ones fill the GPU together.
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

// Rows of an expert, on average. Below, sm80/qmatmul_grouped.
constexpr int64_t kLeastRows = 17;

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  if (mma16::MetasPerRecord(shape) != 1) {
    return absl::StrCat("group size ", shape.group_rows(), " is no multiple of ", mma16::kBlockK);
  }
  if (mma16::BlocksK(shape.k) <= kMostKBlocks) return "";
  return absl::StrCat("got K ", shape.k, ", expected at most ",
                      int64_t{kMostKBlocks} * mma16::kBlockK);
}

// The sums of cut tiles.
int64_t Workspace(const WeightShape&, const DeviceInfo& device, int64_t) {
  return PersistentSumsBytes(device);
}

}  // namespace

const KernelRow& PersistentGroupedRow() {
  static const KernelRow row = [] {
    KernelRow out;
    out.name = "sm90a/qmatmul_grouped";
    out.op = Op::kGroupedMatmul;
    out.device = DeviceKind::kCuda;
    out.claims = Mma16Claims();
    out.claims.bits = 1u << 4;
    out.staged = Staged::kTensorCore;
    out.layout = &kMma16Layout;
    out.min_arch = 90;
    out.max_arch = 90;
    out.min_m = kLeastRows;
    out.priority = 20;
    out.refuses = Refuses;
    out.workspace_bytes = Workspace;
    out.grouped_table = GroupedProductTable;
    out.grouped = RunGroupedProduct;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
