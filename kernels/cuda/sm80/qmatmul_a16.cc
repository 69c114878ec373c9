// Row sm80/qmatmul_a16: the fused product on tensor cores for every number of tokens and every
// width of codes that layout mma16 holds.
#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm80/qmatmul.h"
#include "kernels/cuda/sm80/rows.h"

namespace awqd::cuda {
namespace {

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return DescribeMatmulTile(ChooseMatmulTile(shape, m, device));
}

}  // namespace

const KernelRow& QMatmulA16() {
  static const KernelRow row = {
      .name = "sm80/qmatmul_a16",
      .op = Op::kMatmul,
      .path = Path::kFused,
      .device = DeviceKind::kCuda,
      .claims = Mma16ClaimsOfAnyCode(),
      .staged = Staged::kTensorCore,
      .layout = &kMma16Layout,
      .min_arch = 75,
      .batch_invariant = true,
      .priority = 10,
      .tile = Tile,
      .matmul = RunQMatmul,
  };
  return row;
}

}  // namespace awqd::cuda
