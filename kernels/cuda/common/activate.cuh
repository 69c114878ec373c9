// Activation functions in FP32. Device code only.
#pragma once

#include "kernels/types.h"

namespace awqd::cuda {

__device__ __forceinline__ float Activate(ActivationFunction activation, float v) {
  switch (activation) {
    case ActivationFunction::kRelu:
      return v < 0 ? 0 : v;
    case ActivationFunction::kGelu:
      return 0.5f * v * erfcf(v * -0.70710678f);
    case ActivationFunction::kSilu:
      return v / (1 + expf(-v));
    default:
      return v;
  }
}

}  // namespace awqd::cuda
