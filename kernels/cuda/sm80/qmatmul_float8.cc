// Row sm80/qmatmul_float8: E4M3 activations on tensor cores of E4M3, from compute capability 8.9 on,
// by what becomes E4M3 exactly (RefusesFloat8). The kernel is that of sm80/qmatmul_a16, with E4M3
// fragments (float8_consumer.cuh). Not on Hopper, whose own instructions sm90a/qmatmul_float8 uses;
// AWQD_CUDA_ARCH=89 tests it there.
//
// y = sum over blocks of 128 of K of a * s * (q @ codes) + bias, for E4M3 q with a scale a for each
// token, or for each token and block.
#include <string>

#include "kernels/cuda/common/mma16.h"
#include "kernels/cuda/sm80/qmatmul.h"
#include "kernels/cuda/sm80/rows.h"

namespace awqd::cuda {
namespace {

constexpr int kHopper = 90;

std::string Refuses(const WeightShape& shape, const DeviceInfo& device) {
  return device.arch == kHopper ? "is for GPUs without wgmma" : RefusesFloat8(shape);
}

std::string Tile(const WeightShape& shape, const DeviceInfo& device, int64_t m) {
  return DescribeMatmulTile(ChooseMatmulTile(shape, m, device, DType::kE4m3));
}

}  // namespace

const KernelRow& QMatmulFloat8() {
  static const KernelRow row = {
      .name = "sm80/qmatmul_float8",
      .op = Op::kFloat8Activations,
      .device = DeviceKind::kCuda,
      .claims = kFloat8Claims,
      .input_form = InputForm::kTensorCoreFloat8,
      .layout = &kMma16Layout,
      .min_arch = 89,
      .batch_invariant = true,
      .priority = 10,
      .refuses = Refuses,
      .tile = Tile,
      .matmul = RunQMatmul,
  };
  return row;
}

}  // namespace awqd::cuda
