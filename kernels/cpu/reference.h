// The oracle: what every other row is tested against. Naive, in double, never chosen by default.
#pragma once

#include <vector>

#include "kernels/registry.h"
#include "kernels/weight.h"

namespace awqd {

// "cpu/reference": every operation, any scheme, any layout.
extern const KernelRow kCpuReferenceDequantize;
extern const KernelRow kCpuReferenceMatmul;
extern const KernelRow kCpuReferenceIntegerMatmul;
extern const KernelRow kCpuReferenceQuantizedMatmul;

// The inputs of a product besides its weight, in host memory.
struct ReferenceInput {
  ConstMatrixView x;            // [M, K]
  const float* bias = nullptr;  // FP32 [N], or null for none
  ActivationFunction activation = ActivationFunction::kNone;
};

// The definition, [M, N] row-major in double:
//   y[m, n] = act(sum over stored rows i of t[m, order[i]] * w[i, n] + bias[n])
// with w as in exact.h and t the transform of x * factor. Kernels may round t, and weights, to 16
// bits first.
std::vector<double> ReferenceProduct(const HostWeight& weight, const ReferenceInput& input);

// The definition of the product of INT8 activations, [M, N] row-major:
//   y[m, n] = sum over stored rows i of x[m, order[i]] * (code[i, n] - zero of its block)
std::vector<int64_t> ReferenceIntegers(const HostWeight& weight, const int8_t* x, int64_t tokens);

// Quantised activations: q INT8 [M, K] by in-feature, scale FP32 [M].
struct ReferenceQuantized {
  const int8_t* q = nullptr;
  const float* scale = nullptr;
  int64_t tokens = 0;
  const float* bias = nullptr;  // FP32 [N], or null for none
  ActivationFunction activation = ActivationFunction::kNone;
};

// The definition of their product, [M, N] row-major:
//   y[m, n] = act(scale[m] * sum over stored rows i of q[m, order[i]] * W[i, n] + bias[n])
// with W of scheme.h in double, of integer codes. No factor: it is in q already.
std::vector<double> ReferenceProduct(const HostWeight& weight, const ReferenceQuantized& input);

// The activation function of `value`: NONE, max(0, v), v * Phi(v) with the normal distribution's
// Phi (GELU in its exact form), v / (1 + exp(-v)), GELU by tanh.
double Activate(ActivationFunction activation, double value);

}  // namespace awqd
