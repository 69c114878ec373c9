// Declares the fast CPU rows; backend.cc lists them.
#pragma once

#include "kernels/registry.h"

namespace awqd {

extern const KernelRow kCpuDequantizeW4;  // cpu/dequantize_w4
extern const KernelRow kCpuQmatmulA16W4;  // cpu/qmatmul_a16w4
extern const KernelRow kCpuDenseW4;       // cpu/dense_w4

}  // namespace awqd
