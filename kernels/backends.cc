// The explicit list of backends: no static registrars.
#include "kernels/backends.h"

#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
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
  return OpenCudaDevice(index, options.budget_bytes, options.batch_invariant);
#else
  (void)options;
  return absl::FailedPreconditionError(
      absl::StrCat("cuda:", index, ": this binary was built without CUDA"));
#endif
}

std::unique_ptr<Device> OpenCpu(std::optional<int> index, const DeviceOptions& options) {
  return OpenCpuDevice(options.cpu_threads, options.budget_bytes, index, options.batch_invariant);
}

// N of "<prefix>N".
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

const KernelRow* FindKernel(absl::string_view name) {
  for (const KernelRow* row : AllKernels()) {
    if (row->name == name) return row;
  }
  return nullptr;
}

absl::StatusOr<std::unique_ptr<Device>> OpenDevice(absl::string_view spec,
                                                   const DeviceOptions& options, std::string* why) {
  if (spec == "cpu") {
    if (why != nullptr) *why = "asked for";
    return OpenCpu(std::nullopt, options);
  }
  if (spec == "auto") {
    auto gpu = OpenCuda(0, options);
    if (gpu.ok()) {
      if (why != nullptr) *why = "a GPU answers";
      return gpu;
    }
    if (why != nullptr) *why = std::string(gpu.status().message());
    return OpenCpu(std::nullopt, options);
  }
  if (why != nullptr) *why = "asked for";
  if (const std::optional<int> index = IndexAfter("cpu:", spec)) {
    return OpenCpu(index, options);
  }
  if (const std::optional<int> index = IndexAfter("cuda:", spec)) return OpenCuda(*index, options);
  return absl::InvalidArgumentError(
      absl::StrCat("device: got \"", spec, "\", expected auto, cpu, cpu:N or cuda:N"));
}

}  // namespace awqd
