// The persistent product's kernels for BF16 activations.
#include "kernels/cuda/sm90a/qmatmul_a16w4.cuh"

namespace awqd::cuda {

absl::Status LaunchPersistentBf16(const PersistentParams& params, const PersistentTile& tile,
                                  const DeviceInfo& device, StreamView stream) {
  return LaunchTile<Bf16Math>(params, tile, device, stream);
}

}  // namespace awqd::cuda
