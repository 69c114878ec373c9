// Checked kernel launches: the only way that this backend starts a kernel.
//
//   AWQD_RETURN_IF_ERROR(cuda::Launch<MyKernel<Tile>>("my kernel", {grid, block, bytes, stream},
//                                                     args...));
//
// Only .cu files include this with a kernel; the arguments convert to the kernel's own parameter
// types, as in an ordinary call.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/error.h"
#include "kernels/device.h"

namespace awqd::cuda {

inline cudaStream_t Native(StreamView stream) { return static_cast<cudaStream_t>(stream.handle); }

// Clusters, and starts that overlap the kernel before. A kernel launched with attributes must call
// WaitForEarlierKernels in every block before it touches anything but weights.
struct LaunchAttributes {
  cudaLaunchAttribute list[2] = {};
  int count = 0;
};

// `cluster`: blocks along x that share memory; 1 for none. Empty below sm_90.
LaunchAttributes OverlappedLaunch(const DeviceInfo& device, int cluster = 1);

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  int64_t shared_bytes = 0;
  StreamView stream;
  LaunchAttributes attributes;
};

// The grid of a kernel whose blocks have `threads` columns of one row each. A grid holds 65535 rows
// at most: blocks then step over the rows.
dim3 GridOfRows(int64_t cols, int64_t rows, int64_t threads);

// The untyped core of Launch. INVALID_ARGUMENT for a null stream (that would be the default stream)
// or an empty grid; a launch that CUDA refuses is reported with `name`.
absl::Status LaunchKernel(const void* kernel, absl::string_view name, const LaunchConfig& config,
                          void** args);

// Lets `kernel` use `bytes` of dynamic shared memory on the current device.
absl::Status AllowSharedMemory(const void* kernel, absl::string_view name, int64_t bytes);

// Without an opt-in a block gets at most this much shared memory.
inline constexpr int64_t kDefaultSharedBytes = 48 * 1024;

namespace internal {

template <auto Kernel, typename Signature>
struct Launcher;

template <auto Kernel, typename... Params>
struct Launcher<Kernel, void (*)(Params...)> {
  static absl::Status Run(absl::string_view name, const LaunchConfig& config,
                          std::remove_const_t<Params>... params) {
    if (config.shared_bytes > kDefaultSharedBytes) {
      AWQD_RETURN_IF_ERROR(AllowOnce(name, config.shared_bytes));
    }
    // A kernel without parameters needs a valid array all the same.
    void* args[sizeof...(Params) + 1] = {const_cast<void*>(static_cast<const void*>(&params))...,
                                         nullptr};
    return LaunchKernel(reinterpret_cast<const void*>(Kernel), name, config, args);
  }

 private:
  // The attribute belongs to the kernel and the device; once granted it stays.
  static absl::Status AllowOnce(absl::string_view name, int64_t bytes) {
    static std::atomic<int64_t> granted[64] = {};
    std::atomic<int64_t>& most = granted[CurrentDevice() & 63];
    if (most.load(std::memory_order_acquire) >= bytes) return absl::OkStatus();
    AWQD_RETURN_IF_ERROR(AllowSharedMemory(reinterpret_cast<const void*>(Kernel), name, bytes));
    // Two threads with different sizes may race. If the smaller size is remembered, the next launch
    // makes one call too many; AllowSharedMemory never lowers the limit.
    int64_t seen = most.load();
    while (seen < bytes && !most.compare_exchange_weak(seen, bytes)) {
    }
    return absl::OkStatus();
  }
};

}  // namespace internal

// Enqueues Kernel(args...). OK means enqueued; faults of the kernel itself surface at Synchronize.
// The weight's or buffer's device must be the thread's (UseDevice).
template <auto Kernel, typename... Args>
absl::Status Launch(absl::string_view name, const LaunchConfig& config, Args&&... args) {
  return internal::Launcher<Kernel, decltype(Kernel)>::Run(name, config,
                                                           static_cast<Args&&>(args)...);
}

}  // namespace awqd::cuda
