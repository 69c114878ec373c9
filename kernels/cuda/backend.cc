// The CUDA backend: its rows, an explicit list of its folders, and its devices.
#include "kernels/cuda/dense/backend.h"

#include <vector>

#include "kernels/backends.h"
#include "kernels/cuda/core/device.h"
#include "kernels/cuda/sm80/backend.h"
#include "kernels/cuda/sm90a/backend.h"

namespace awqd {

absl::Span<const KernelRow* const> CudaKernels() {
  static const std::vector<const KernelRow*>* const rows = [] {
    auto* all = new std::vector<const KernelRow*>;
    for (const auto folder : {Sm90aKernels(), Sm80Kernels(), DenseKernels()}) {
      all->insert(all->end(), folder.begin(), folder.end());
    }
    return all;
  }();
  return *rows;
}

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int index, int64_t budget_bytes,
                                                       bool batch_invariant,
                                                       const std::string& id_suffix) {
  return cuda::CudaDevice::Open(index, budget_bytes, batch_invariant, id_suffix);
}

}  // namespace awqd
