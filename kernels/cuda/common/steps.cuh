// Device code that the prologue and the steps between experts share: the factor with which a row of
// FP32 becomes FP16.
#pragma once

#include "kernels/types.h"

namespace awqd::cuda {

// Rows of FP32 are multiplied by a power of two of their own before they become FP16: no finite
// value overflows, and rounding is relative to the row's largest value.

inline constexpr float kLargestFloat = 3.4028235e38f;

// The exponent of the factor of a row's sums. `largest`: the row's largest finite magnitude, which
// goes to [2^14, 2^15), half of the largest FP16.
__device__ __forceinline__ int HalfExponent(float largest) {
  return largest == 0 ? 0 : max(-100, ilogbf(largest) - 14);
}

// The largest value of the kTeam threads of a row, the same in every one: a warp, or all threads of
// the block.
template <int kTeam>
__device__ float LargestOfTeam(float largest) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
  }
  if constexpr (kTeam > 32) {
    __shared__ float by_warp[kTeam / 32];
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kTeam / 32; ++w) largest = fmaxf(largest, by_warp[w]);
  }
  return largest;
}

}  // namespace awqd::cuda
