// The list of backends, written out instead of registered by static objects.
#include "kernels/backends.h"

#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/process_limits.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"

namespace awqd {
namespace {

std::vector<const KernelRow*> Collect() {
  std::vector<const KernelRow*> rows;
  for (const KernelRow* row : CpuKernels()) rows.push_back(row);
#ifdef AWQD_CUDA
  for (const KernelRow* row : CudaKernels()) rows.push_back(row);
#endif
  return rows;
}

absl::StatusOr<std::unique_ptr<Device>> OpenCuda(int index, const DeviceOptions& options) {
#ifdef AWQD_CUDA
  return OpenCudaDevice(index, options.budget_bytes, options.batch_invariant, options.id_suffix);
#else
  (void)options;
  return absl::FailedPreconditionError(
      absl::StrCat("cuda:", index, ": this binary was built without CUDA"));
#endif
}

// Parses N from "<prefix>N".
std::optional<int> IndexAfter(absl::string_view prefix, absl::string_view spec) {
  int index = 0;
  if (!absl::ConsumePrefix(&spec, prefix) || !absl::SimpleAtoi(spec, &index) || index < 0) {
    return std::nullopt;
  }
  return index;
}

}  // namespace

absl::Span<const KernelRow* const> AllKernels() {
  static const std::vector<const KernelRow*>* const rows =
      new std::vector<const KernelRow*>(Collect());
  return *rows;
}

const Steps& StepsOf([[maybe_unused]] const Device& device) {
#ifdef AWQD_CUDA
  if (device.info().kind == DeviceKind::kCuda) return CudaSteps();
#endif
  return CpuSteps();
}

const Kv4Ops& Kv4Of([[maybe_unused]] const Device& device) {
#ifdef AWQD_CUDA
  if (device.info().kind == DeviceKind::kCuda) return CudaKv4();
#endif
  return CpuKv4();
}

int64_t HostFreeBytes() { return AvailableMemoryBytes(); }

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(absl::string_view spec,
                                                   const DeviceOptions& options, std::string* why) {
  std::string reason;
  if (why == nullptr) why = &reason;
  *why = "asked for";
  if (spec == "auto") {
    auto gpu = OpenCuda(0, options);
    *why = gpu.ok() ? "a GPU answers" : std::string(gpu.status().message());
    return gpu.ok() ? std::move(gpu) : OpenCpuDevice(options);
  }
  if (spec == "cpu") return OpenCpuDevice(options);
  if (const std::optional<int> index = IndexAfter("cpu:", spec))
    return OpenCpuDevice(options, index);
  if (const std::optional<int> index = IndexAfter("cuda:", spec)) return OpenCuda(*index, options);
  return BadValue("device", absl::StrCat("\"", spec, "\""), "auto, cpu, cpu:N or cuda:N");
}

}  // namespace awqd
