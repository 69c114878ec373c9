// The persistent product's kernels for FP16 activations that keep the order of sums.
#include "kernels/cuda/sm90a/qmatmul_a16w4.cuh"

namespace awqd::cuda {

absl::Status LaunchChainedFp16(const PersistentParams& params, const PersistentTile& tile,
                               const DeviceInfo& device, StreamView stream) {
  return LaunchChainedTile<Fp16Math>(params, tile, device, stream);
}

}  // namespace awqd::cuda
