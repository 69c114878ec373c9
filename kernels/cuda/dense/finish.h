// The two small kernels around a dense product: widening decoded weights, and bias plus rounding.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace awqd::dense {

// wide[i] = narrow[i] for `count` FP16 values; exact.
absl::Status Widen(const void* narrow, float* wide, int64_t count, StreamView stream);

// y[r, c] = round(sums[r, c] + bias[c]), one rounding to y's dtype. Rows of `sums` are `ld_sums`
// apart and rows of y `ld_y`; `sums` may be y itself when y is FP32. `bias` may be null.
struct FinishArgs {
  const float* sums = nullptr;
  int64_t ld_sums = 0;
  const float* bias = nullptr;
  void* y = nullptr;
  DType out = DType::kFp16;
  int64_t ld_y = 0;
  int64_t rows = 0;
  int64_t cols = 0;
};
absl::Status Finish(const FinishArgs& args, StreamView stream);

}  // namespace awqd::dense
