// Repairs FP32 products whose partial sums passed the range of FP32.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device.h"

namespace awqd::dense {

// y[m, n] = x[m, k] @ w[k, n], all FP32 and row-major; rows of x and w are contiguous, rows of y
// are `ld_y` elements apart.
struct OverflowArgs {
  const float* x = nullptr;
  const float* w = nullptr;
  float* y = nullptr;
  int64_t ld_y = 0;
  int64_t m = 0, n = 0, k = 0;
};

// Computes each element of y that is infinite or NaN once more, in FP64. An overflow in FP32 always
// leaves such an element, so afterwards y is right wherever the exact sum is finite.
absl::Status RepairOverflows(const OverflowArgs& args, StreamView stream);

}  // namespace awqd::dense
