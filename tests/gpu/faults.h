// Kernels that fail on purpose.
#pragma once

#include "absl/status/status.h"
#include "kernels/device.h"

namespace awqd::testing {

// Enqueues a kernel that writes to an invalid address; the stream's Synchronize then fails, and the
// device is lost for the rest of the process.
absl::Status EnqueueIllegalWrite(StreamView stream);

// Launches a block of more threads than any GPU accepts: the launch is refused, and nothing is
// lost.
absl::Status LaunchTooManyThreads(StreamView stream);

// Needs `bytes` of dynamic shared memory, and writes their sum of ones to `out`.
absl::Status LaunchWithSharedMemory(int64_t bytes, int* out, StreamView stream);

// Keeps the stream busy for about `microseconds`, then writes `value` to `out`.
absl::Status WriteAfterDelay(int64_t microseconds, int value, int* out, StreamView stream);

}  // namespace awqd::testing
