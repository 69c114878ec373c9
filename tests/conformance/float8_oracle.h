// The definition of products of activations that are rounded to E4M3 (kernels/steps.h), in double.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/registry.h"
#include "tests/conformance/cases.h"
#include "tests/testing/matchers.h"

namespace awqd::testing {

// The nearest E4M3, found among all; of two the one with an even code. Larger numbers give 448.
float NearestE4m3(float value);

// Rows of x [rows, K] of `dtype` as a product of `weight` gets them, a * q: by stored rows, times
// the factor, transformed, then rounded as `how` says.
std::vector<float> RoundToE4m3(const HostWeight& weight, const std::vector<uint8_t>& x, DType dtype,
                               int64_t rows, const Quantized& how);

// act(x W + bias) [rows, N] of such rows.
std::vector<double> ProductOfStaged(HostWeight weight, const std::vector<float>& x,
                                    ActivationFunction activation);

// E4M3 tensor cores keep some 14 bits of the sums of a step: up to 2.2e-4 was seen (H200).
inline double Float8Tolerance(const KernelRow& row, DType out, DType in) {
  const bool cores = row.op == Op::kFloat8Activations || row.op == Op::kGroupedFloat8;
  return cores && out == DType::kFp32 ? 3e-4 : ProductTolerance(out, in);
}

}  // namespace awqd::testing
