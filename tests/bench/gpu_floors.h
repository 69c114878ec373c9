// Kernels that do only the unavoidable work: the floors of GPU timings.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device.h"
#include "kernels/types.h"

namespace awqd::bench {

// Fills with FP16 values of magnitude 1/16 to 1 and both signs; as packed bytes they are random.
// Zeros would run faster than data.
absl::Status FillRandom(void* data, int64_t bytes, uint64_t seed, StreamView stream);

// Reads `bytes` (a multiple of 16) once. `sink` is written only when a sum has one value of 2^32.
absl::Status ReadOnce(const void* data, int64_t bytes, int sm_count, uint32_t* sink,
                      StreamView stream);

// Reads `packed_bytes` once and writes `weights` values of `out` (a multiple of 8 of them).
absl::Status Expand(const void* packed, int64_t packed_bytes, int64_t weights, DType dtype,
                    void* out, StreamView stream);

}  // namespace awqd::bench
