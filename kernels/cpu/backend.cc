// The rows of the CPU backend, in a fixed order.
#include "kernels/backends.h"
#include "kernels/cpu/reference.h"
#include "kernels/cpu/rows.h"

namespace awqd {

absl::Span<const KernelRow* const> CpuKernels() {
  static const KernelRow* const rows[] = {
      &kCpuDequantizeW4,        &kCpuQmatmulA16W4,    &kCpuDenseW4,
      &kCpuReferenceDequantize, &kCpuReferenceMatmul,
  };
  return rows;
}

}  // namespace awqd
