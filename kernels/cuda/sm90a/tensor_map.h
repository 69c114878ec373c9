// Tensor maps of activations.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/registry.h"

namespace awqd::cuda {

// A tensor map, which tells the copy engine how activations lie in memory: x as the prologue left
// it, rows `x_stride` elements apart (0: K), read in boxes of `box_rows` x 128 bytes into 128-byte
// rows with the 128-byte swizzle; zeros past the edges. x and its rows lie on 16-byte boundaries.
// FAILED_PRECONDITION when the driver is older than sm_90.
absl::Status MapTokens(const ConstMatrixView& x, int64_t x_stride, int box_rows, CUtensorMap* map);

}  // namespace awqd::cuda
