// The fused product's kernels for FP16 activations.
#include "kernels/cuda/sm80/qmatmul_a16w4.cuh"

namespace awqd::cuda {

absl::Status LaunchQMatmulFp16(const QMatmulParams& params, const MatmulTile& tile,
                               const DeviceInfo& device, StreamView stream) {
  return LaunchTile<Fp16Math>(params, tile, device, stream);
}

}  // namespace awqd::cuda
