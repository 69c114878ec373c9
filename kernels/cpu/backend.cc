// The rows of the CPU backend, in a fixed order.
#include "kernels/backends.h"
#include "kernels/cpu/reference.h"
#include "kernels/cpu/rows.h"

namespace awqd {

absl::Span<const KernelRow* const> CpuKernels() {
  static const KernelRow* const rows[] = {
    &kCpuDequantize,
    &kCpuQmatmulA16,
#if defined(AWQD_CPU_X86)
    &kCpuQmatmulA16Pairs,
#endif
    &kCpuDense,
    &kCpuPlainDequantize,
    &kCpuPlainMatmul,
    &kCpuVectorsDequantize,
    &kCpuVectorsMatmul,
    &kCpuTrellisDequantize,
    &kCpuTrellisMatmul,
    &kCpuQmatmulA8,
    &kCpuQmatmulA8Scaled,
    &kCpuReferenceDequantize,
    &kCpuReferenceMatmul,
    &kCpuReferenceIntegerMatmul,
    &kCpuReferenceQuantizedMatmul,
  };
  return rows;
}

}  // namespace awqd
