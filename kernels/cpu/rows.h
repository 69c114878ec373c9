// Declares the CPU rows but for the reference; backend.cc lists them.
#pragma once

#include "kernels/registry.h"

namespace awqd {

extern const KernelRow kCpuDequantize;       // cpu/dequantize
extern const KernelRow kCpuQmatmulA16;       // cpu/qmatmul_a16
extern const KernelRow kCpuQmatmulA16Pairs;  // cpu/qmatmul_a16_pairs
extern const KernelRow kCpuQmatmulA8;        // cpu/qmatmul_a8
extern const KernelRow kCpuQmatmulA8Scaled;  // cpu/qmatmul_a8_scaled
extern const KernelRow kCpuDense;            // cpu/dense
extern const KernelRow kCpuPlainDequantize;  // cpu/plain_dequantize
extern const KernelRow kCpuPlainMatmul;      // cpu/plain_matmul

}  // namespace awqd
