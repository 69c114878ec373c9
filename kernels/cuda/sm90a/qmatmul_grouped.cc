// Row sm90a/qmatmul_grouped: the products of a stack of experts by one kernel, that of
// sm90a/qmatmul_a16: its tiles are those of all experts, so that small ones fill the GPU together.
#include <cstdint>
#include <string>

#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

// Rows of an expert, on average. Below, sm80/qmatmul_grouped. H200, 2026-11-29, 128 experts of
// 2048 x 768: 4 rows take 129 us here and 118 there, 16 rows 144 and 187; 256 experts of
// 7168 x 2048, 8 rows, 1628 and 1961. Records of several metas have no tile of 16 tokens: 48
// experts of 7168 x 2048 in groups of 32, 11 rows, 512 and 480.
constexpr int64_t kLeastRows = 8, kLeastRowsOfOthers = 17;

int64_t PreferredFrom(const WeightShape& shape, const DeviceInfo&) {
  return KindOf(shape) == Integers(4, 1) ? kLeastRows : kLeastRowsOfOthers;
}

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  if (KindOf(shape) == kE2m1LongScales) return "takes E2M1 with scales of E4M3 and E8M0";
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
      .preferred_from = PreferredFrom,
      .priority = 20,
      .refuses = Refuses,
      .workspace_bytes = WorkspaceOfSums,
      .grouped_table = GroupedProductTable,
      .grouped_tile = GroupedProductTile,
      .grouped = RunGroupedProduct,
  };
  return row;
}

}  // namespace awqd::cuda
