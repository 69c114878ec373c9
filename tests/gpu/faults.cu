// Kernels that fail on purpose, and two that are slow or use much memory.
#include "kernels/cuda/core/launch.h"
#include "tests/gpu/faults.h"

namespace awqd::testing {
namespace {

__global__ void IllegalWrite(int* nowhere) { *nowhere = 1; }

__global__ void SumShared(int bytes, int* out) {
  extern __shared__ unsigned char ones[];
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) ones[i] = 1;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int sum = 0;
  for (int i = 0; i < bytes; ++i) sum += ones[i];
  *out = sum;
}

__global__ void Delay(long long nanoseconds, int value, int* out) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < static_cast<unsigned long long>(nanoseconds));
  *out = value;
}

}  // namespace

absl::Status EnqueueIllegalWrite(StreamView stream) {
  return cuda::Launch<IllegalWrite>("illegal write", {dim3(1), dim3(1), 0, stream},
                                    reinterpret_cast<int*>(uintptr_t{0x10}));
}

absl::Status LaunchTooManyThreads(StreamView stream) {
  return cuda::Launch<IllegalWrite>("too many threads", {dim3(1), dim3(4096), 0, stream}, nullptr);
}

absl::Status LaunchWithSharedMemory(int64_t bytes, int* out, StreamView stream) {
  return cuda::Launch<SumShared>("sum shared", {dim3(1), dim3(128), bytes, stream},
                                 static_cast<int>(bytes), out);
}

absl::Status WriteAfterDelay(int64_t microseconds, int value, int* out, StreamView stream) {
  return cuda::Launch<Delay>("delay", {dim3(1), dim3(1), 0, stream},
                             static_cast<long long>(microseconds * 1000), value, out);
}

}  // namespace awqd::testing
