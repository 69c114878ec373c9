// The persistent product's kernels for FP16 activations.
#include "kernels/cuda/sm90a/qmatmul_a16w4.cuh"

namespace awqd::cuda {

absl::Status LaunchPersistentFp16(const PersistentParams& params, const PersistentTile& tile,
                                  const DeviceInfo& device, StreamView stream) {
  return LaunchTile<Fp16Math>(params, tile, device, stream);
}

}  // namespace awqd::cuda
