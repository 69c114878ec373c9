// The fused product's kernels for BF16 activations.
#include "kernels/cuda/sm80/qmatmul_a16w4.cuh"

namespace awqd::cuda {

absl::Status LaunchQMatmulBf16(const QMatmulParams& params, const MatmulTile& tile,
                               const DeviceInfo& device, StreamView stream) {
  return LaunchTile<Bf16Math>(params, tile, device, stream);
}

}  // namespace awqd::cuda
