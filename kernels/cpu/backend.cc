// The rows of the CPU backend, in a fixed order.
#include "kernels/backends.h"
#include "kernels/cpu/reference.h"

namespace awqd {

absl::Span<const KernelRow* const> CpuKernels() {
  static const KernelRow* const rows[] = {
      &kCpuReferenceDequantize,
      &kCpuReferenceMatmul,
  };
  return rows;
}

}  // namespace awqd
