// What a backend gives to kernels/: its rows, its steps, its KV4 and its devices.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/kv4.h"
#include "kernels/registry.h"
#include "kernels/steps.h"

namespace awqd {

absl::Span<const KernelRow* const> CpuKernels();
const Steps& CpuSteps();
const Kv4Ops& CpuKv4();
// How a CPU device uses a machine of several sockets.
struct CpuPlacement {
  // Worker i stays on the i-th core after the first that the process may use. Callers stay free.
  bool pin_threads = false;
  // Pages of large buffers go round the memory nodes that the process may use, so that all
  // controllers are read at once. Has no effect where the system does not allow it.
  bool interleave = false;
};
// `threads` 0: as many as the process may use. `budget_bytes` 0: no cap. With an index the id is
// "cpu:N": several of them share cores and memory, and stand in for several GPUs.
std::unique_ptr<Device> OpenCpuDevice(int threads, int64_t budget_bytes,
                                      std::optional<int> index = std::nullopt,
                                      bool batch_invariant = false,
                                      const std::string& id_suffix = "",
                                      const CpuPlacement& placement = {});

// Of the machine, or of the container around the process.
int64_t CpuFreeBytes();

// Only in builds with AWQD_CUDA.
absl::Span<const KernelRow* const> CudaKernels();
const Steps& CudaSteps();
const Kv4Ops& CudaKv4();
// FAILED_PRECONDITION when there is no such device, its driver is too old, or no kernel was built
// for it.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int index, int64_t budget_bytes,
                                                       bool batch_invariant = false,
                                                       const std::string& id_suffix = "");

// Of whichever backend the device is of.
const Steps& StepsOf(const Device& device);

}  // namespace awqd
