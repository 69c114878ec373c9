// One dense product through cuBLASLt, with its algorithm remembered.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace awqd::dense {

// y[m, n] = x[m, k] @ w[k, n], all row-major; rows of x and w are contiguous, rows of y are `ld_y`
// elements apart.
struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;
  const void* x = nullptr;
  const void* w = nullptr;
  void* y = nullptr;
  int64_t ld_y = 0;
  DType in = DType::kFp16;    // of x and w
  DType out = DType::kFp16;   // of y
  void* workspace = nullptr;  // 256-byte aligned
  int64_t workspace_bytes = 0;
};

// Whether cuBLASLt writes `out` from `in` itself.
constexpr bool GemmSupports(DType in, DType out) {
  return IsFloating(in) && (out == in || out == DType::kFp32);
}

// Enqueues the product on `stream` of the thread's device. FP32 accumulation and one rounding to
// `out`; FP32 inputs are multiplied in FP32, not TF32. Sums of a split K are kept in FP32, in a
// fixed order, so that equal calls give equal bits and no partial sum can overflow FP16.
// After the first call of a shape (tokens are bucketed) nothing is allocated. Thread-safe.
absl::Status Gemm(const GemmArgs& args, StreamView stream);

// Computes each element of y that is infinite or NaN once more, in FP64; for FP32 x, w and y after
// Gemm. An overflow in FP32 always leaves such an element, so afterwards y is right wherever the
// exact sum is finite.
absl::Status RepairOverflows(const GemmArgs& args, StreamView stream);

}  // namespace awqd::dense
