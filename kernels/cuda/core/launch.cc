// Launches through cudaLaunchKernelExC and checks them at once.
#include "kernels/cuda/core/launch.h"

#include <algorithm>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"

namespace awqd::cuda {

LaunchAttributes OverlappedLaunch(const DeviceInfo& device, int cluster) {
  LaunchAttributes out;
  if (device.arch < 90) return out;
  if (cluster > 1) {
    out.list[out.count].id = cudaLaunchAttributeClusterDimension;
    out.list[out.count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  out.list[out.count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  out.list[out.count++].val.programmaticStreamSerializationAllowed = 1;
  return out;
}

dim3 GridOfRows(int64_t cols, int64_t rows, int64_t threads) {
  constexpr int64_t kMostRows = 65535;
  return {static_cast<unsigned>(CeilDiv(cols, threads)),
          static_cast<unsigned>(std::min(rows, kMostRows))};
}

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
  native.attrs = const_cast<cudaLaunchAttribute*>(config.attributes.list);
  native.numAttrs = static_cast<unsigned>(config.attributes.count);
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
