// Maps that tell the tensor copy engine how activations lie in memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "absl/status/status.h"

namespace awqd::cuda {

inline constexpr int kMapColumns = 64;  // of 16 bits, in a box

// A map of [rows, cols] elements of `element_bytes`, 1 or 2, `stride` elements between rows, read
// in boxes of `box_rows` x 128 bytes into 128-byte rows with the 128-byte swizzle; zeros past the
// edges. `data` and the rows lie on 16-byte boundaries. FAILED_PRECONDITION when the driver is
// older than sm_90.
absl::Status MapTokens(const void* data, int64_t rows, int64_t cols, int64_t stride,
                       int element_bytes, int box_rows, CUtensorMap* map);

}  // namespace awqd::cuda
