// Random weights and activations from a seed, including values that break kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/types.h"
#include "kernels/weight.h"

namespace awqd::testing {

enum class Scales : uint8_t {
  kOrdinary,  // like a checkpoint's: 0.001 to 0.03, both signs
  // Zero, denormal, the smallest normal and the largest finite scales among ordinary ones. FP16 has
  // the large ones in columns of their own, among scales of 1 to 30, because records of layout
  // mma16 hold all of a column exactly.
  kExtreme,
  kLarge  // 1024 to 65504, both signs: products with codes exceed FP16
};

struct WeightSpec {
  int64_t k = 128;
  int64_t n = 64;
  // A group of more than K rows becomes one of K.
  QuantizationScheme scheme = Asymmetric(4, 128);
  Scales scales = Scales::kOrdinary;
  bool bias = false;
  bool order = false;
  bool factor = false;
  int64_t hadamard = 0;  // the block of a transform of activations; 0: none
  uint64_t seed = 1;
};

// A legal weight; equal for equal specs on every machine.
HostWeight RandomWeight(const WeightSpec& spec);

// [rows, cols] of `dtype`, as bytes: standard normal, INT8 uniform.
std::vector<uint8_t> RandomMatrix(int64_t rows, int64_t cols, DType dtype, uint64_t seed);

// Raw bits of one value of a 16- or 32-bit float type, in a matrix of bytes.
void SetElement(std::vector<uint8_t>* matrix, DType dtype, int64_t index, float value);
float GetElement(const std::vector<uint8_t>& matrix, DType dtype, int64_t index);

}  // namespace awqd::testing
