// How rows of FP32 become FP16 for tensor cores: times a power of two of their own, so that no
// finite value overflows and rounding is relative to the row's largest. Device code only.
#pragma once

namespace awqd::cuda {

inline constexpr float kLargestFloat = 3.4028235e38f;

// The exponent of what sums of a row are multiplied by. `largest`: its largest finite magnitude,
// which goes to [2^14, 2^15), half of what FP16 can hold.
__device__ __forceinline__ int HalfExponent(float largest) {
  return largest == 0 ? 0 : max(-100, ilogbf(largest) - 14);
}

}  // namespace awqd::cuda
