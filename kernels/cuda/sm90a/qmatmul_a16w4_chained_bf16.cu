// The persistent product's kernels for BF16 activations that keep the order of sums.
#include "kernels/cuda/sm90a/qmatmul_a16w4.cuh"

namespace awqd::cuda {

absl::Status LaunchChainedBf16(const PersistentParams& params, const PersistentTile& tile,
                               const DeviceInfo& device, StreamView stream) {
  return LaunchChainedTile<Bf16Math>(params, tile, device, stream);
}

}  // namespace awqd::cuda
