// The oracle: what every other row is tested against. Naive, in double, never chosen by default.
#pragma once

#include <vector>

#include "kernels/registry.h"
#include "kernels/weight.h"

namespace awqd {

// "cpu/reference": both operations, any scheme with 16-bit activations, any layout.
extern const KernelRow kCpuReferenceDequantize;
extern const KernelRow kCpuReferenceMatmul;

// (q - z) * s for element (row, col), exactly: 9 bits times at most 24 fit a double.
double ExactWeight(const CanonicalWeight& weight, int64_t row, int64_t col);

// The weight that a product multiplies by. With FP16 scales it is what Dequantize to FP16 returns,
// one rounding of the exact weight; with BF16 and FP32 scales it is the exact weight.
double ProductWeight(const CanonicalWeight& weight, int64_t row, int64_t col);

// x @ W + bias, [x.rows, N] row-major. `x` in host memory; `bias` FP32 [N] or null.
std::vector<double> ReferenceProduct(const CanonicalWeight& weight, const ConstMatrixView& x,
                                     const float* bias);

}  // namespace awqd
