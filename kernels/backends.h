// The interface of a backend: its registry rows, steps, KV4 functions and devices.
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
// Opens the CPU. With an index the id is "cpu:N": several such devices share cores and memory, and
// replace several GPUs in tests.
std::unique_ptr<Device> OpenCpuDevice(const DeviceOptions& options = {},
                                      std::optional<int> index = std::nullopt);

// Defined in builds with AWQD_CUDA only.
absl::Span<const KernelRow* const> CudaKernels();
const Steps& CudaSteps();
const Kv4Ops& CudaKv4();
// Opens a GPU. FAILED_PRECONDITION when there is no such device, its driver is too old, or no
// kernel was built for it.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int index, int64_t budget_bytes,
                                                       bool batch_invariant = false,
                                                       const std::string& id_suffix = "");

// The steps of the device's backend.
const Steps& StepsOf(const Device& device);

}  // namespace awqd
