// Launches through cudaLaunchKernelExC and checks them at once.
#include "kernels/cuda/core/launch.h"

#include <mutex>

#include "absl/strings/str_cat.h"

namespace awqd::cuda {

absl::Status LaunchKernel(const void* kernel, absl::string_view name, const LaunchConfig& config,
                          void** args) {
  const dim3 g = config.grid, b = config.block;
  if (config.stream.handle == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": got the null stream, expected a stream of Device::CreateStream"));
  }
  if (g.x == 0 || g.y == 0 || g.z == 0 || b.x == 0 || b.y == 0 || b.z == 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": got grid ", g.x, " x ", g.y, " x ", g.z,
                                                   " of blocks ", b.x, " x ", b.y, " x ", b.z,
                                                   ", expected no zero"));
  }
  cudaLaunchConfig_t native = {};
  native.gridDim = g;
  native.blockDim = b;
  native.dynamicSmemBytes = static_cast<size_t>(config.shared_bytes);
  native.stream = Native(config.stream);
  native.attrs = const_cast<cudaLaunchAttribute*>(config.attributes);
  native.numAttrs = static_cast<unsigned>(config.attribute_count);
  const cudaError_t error = cudaLaunchKernelExC(&native, kernel, args);
  if (error == cudaSuccess) return absl::OkStatus();
  return Report(error, absl::StrCat("launch of ", name));
}

absl::Status AllowSharedMemory(const void* kernel, absl::string_view name, int64_t bytes) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  cudaFuncAttributes now = {};
  if (const cudaError_t error = cudaFuncGetAttributes(&now, kernel); error != cudaSuccess) {
    return Report(error, absl::StrCat("attributes of ", name));
  }
  if (now.maxDynamicSharedSizeBytes >= bytes) return absl::OkStatus();
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) return absl::OkStatus();
  return Report(error, absl::StrCat(bytes, " bytes of shared memory for ", name));
}

}  // namespace awqd::cuda
