// Rows sm90a/qmatmul_a16 and sm90a/qmatmul_a16_chained: the fused product on Hopper's tensor cores,
// 17 tokens and more.
#include <cstdint>
#include <string>

#include "kernels/cuda/sm90a/qmatmul.h"
#include "kernels/cuda/sm90a/rows.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {
namespace {

// Up to 16, sm80/qmatmul_a16 is faster nearly everywhere: H100, 2026-11-23, 16 tokens of 28672 x
// 8192 46.5 us there and 47.1 here, of 4096 x 4096 5.9 and 6.7, of 8192 x 8192 15.4 and 16.7; but
// of 8192 x 57344 94.7 and 93.4. From 17 to 24 it depends on the layer: 24 tokens of 4096 x 4096
// take 6.6 and 6.8, of 14336 x 4096 15.5 and 14.2, all layers of an 8B model in turn 61.6 and 61.7.
constexpr int64_t kLeastTokens = 17;

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return DescribeTile(shape, device, m, DType::kFp16);
}

// E2M1 and E4M3 too, where their products with the scale are exact or the scale is the column's.
Claims A16Claims() {
  Claims out = Mma16ClaimsOfAnyCode();
  out.codes &= ~MaskOf(CodeKind::kTable);
  out.zeros = kIntegerZeros;
  out.bits = kFourBits | kEightBits;
  return out;
}

std::string Refuses(const WeightShape& shape, const DeviceInfo&) {
  const WeightDescription& d = shape.description;
  const bool small_scales = d.scale_dtype == DType::kE4m3 || d.scale_dtype == DType::kE8m0;
  if (d.code == CodeKind::kE2m1 && !small_scales) {
    return "takes E2M1 with scales of E4M3 and E8M0";
  }
  if (d.code == CodeKind::kE4m3 && !mma16::HasBareRecords(shape)) {
    return "takes E4M3 with one scale for a column";
  }
  return RefusesRecords(shape, d.bits == 8 ? 1 : kEveryMeta);
}

int64_t ChainedWorkspace(const WeightShape& shape, const DeviceInfo& device, int64_t) {
  return ChainedSumsBytes(shape, device);
}

}  // namespace

const KernelRow& PersistentA16Row() {
  static const KernelRow row = {
      .name = "sm90a/qmatmul_a16",
      .op = Op::kMatmul,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .claims = A16Claims(),
      .staged = Staged::kTensorCore,
      .layout = &kMma16Layout,
      .min_arch = 90,
      .max_arch = 90,
      .min_m = kLeastTokens,
      // tests/bench/README.md has the table.
      .replaces_dense = true,
      .priority = 20,
      .refuses = Refuses,
      .tile = Tile,
      .workspace_bytes = WorkspaceOfSums,
      .matmul = RunProduct,
  };
  return row;
}

const KernelRow& ChainedA16Row() {
  static const KernelRow row = [] {
    KernelRow out = PersistentA16Row();
    out.name = "sm90a/qmatmul_a16_chained";
    out.batch_invariant = true;
    out.claims = ClaimsOfBits(kFourBits);
    // Above sm80/qmatmul_a16, whose sums have the same order, and below the row that keeps none.
    out.priority = 15;
    out.tile = DescribeChainedTile;
    out.workspace_bytes = ChainedWorkspace;
    out.matmul = RunChainedProduct;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
