// Activations made ready for the tensor cores: 16-bit, rows 16-byte aligned.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace awqd::cuda {

// True when kernels can read `x` where it is: 16-bit, and rows and base on 16-byte boundaries.
bool TokensAreReady(const ConstMatrixView& x);

struct StagedTokens {
  void* data;      // [m, stride] of 16-bit elements, zero past k
  int64_t stride;  // k rounded up to 8
  float* scale;    // [m]
};

int64_t StagedTokensBytes(int64_t m, int64_t k);

// Where StageTokens writes within a workspace of StagedTokensBytes.
StagedTokens CarveStagedTokens(void* workspace, int64_t m, int64_t k);

// FP32 rows become fp16 times a power of two of their own (in `scale`), so that no finite value
// overflows and rounding is relative to the row's largest; 16-bit rows are copied and get scale 1.
absl::Status StageTokens(const ConstMatrixView& x, const StagedTokens& out, StreamView stream);

}  // namespace awqd::cuda
