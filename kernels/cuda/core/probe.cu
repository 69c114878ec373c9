// The kernel that ProbeKernelImage looks for.
#include "kernels/cuda/core/device.h"
#include "kernels/cuda/core/error.h"

namespace awqd::cuda {
namespace {

__global__ void Probe(int* out) {
  if (out != nullptr) *out = 1;
}

}  // namespace

absl::StatusOr<int> ProbeKernelImage() {
  cudaFuncAttributes attributes = {};
  AWQD_CUDA_RETURN_IF_ERROR(
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&Probe)));
  return attributes.ptxVersion;
}

}  // namespace awqd::cuda
