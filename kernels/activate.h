// Activation functions on the host, in FP32.
#pragma once

#include <cmath>

#include "kernels/types.h"

namespace awqd {

inline float ActivateFloat(ActivationFunction activation, float v) {
  switch (activation) {
    case ActivationFunction::kNone:
      return v;
    case ActivationFunction::kRelu:
      return v < 0 ? 0 : v;
    case ActivationFunction::kGelu:
      return 0.5f * v * std::erfc(v * -0.70710678f);
    case ActivationFunction::kSilu:
      return v / (1 + std::exp(-v));
  }
  return v;
}

}  // namespace awqd
