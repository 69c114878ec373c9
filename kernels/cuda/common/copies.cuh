// Copies of 16 bytes from global to shared memory that are begun together and end together. From
// sm_80 on the hardware carries them out by itself (cp.async); before, what was read waits in
// registers, so that a consumer multiplies while its next loads are on their way. Device code only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/common/ptx.cuh"

namespace awqd::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr bool kAsyncCopies = false;
#else
inline constexpr bool kAsyncCopies = true;  // for the host too
#endif

// Up to kMost of one thread. Every `at` is known when compiled, or the registers become memory.
template <int kMost, bool kAsync = kAsyncCopies>
class Copies {
 public:
  __device__ __forceinline__ void Start(int, uint32_t shared, const void* global) {
    CopyAsync16(shared, global);
  }
  // Zeros, and nothing is read, where not `valid`.
  __device__ __forceinline__ void StartOrZero(int, uint32_t shared, const void* global,
                                              bool valid) {
    CopyAsync16OrZero(shared, global, valid);
  }
  // Nothing: groups are committed and waited for (ptx.cuh).
  __device__ __forceinline__ void Land() {}
};

template <int kMost>
class Copies<kMost, false> {
 public:
  static_assert(kMost <= 32);

  __device__ __forceinline__ void Start(int at, uint32_t shared, const void* global) {
    StartOrZero(at, shared, global, true);
  }
  __device__ __forceinline__ void StartOrZero(int at, uint32_t shared, const void* global,
                                              bool valid) {
    held_[at] = valid ? *static_cast<const uint4*>(global) : uint4{};
    to_[at] = shared;
    started_ |= 1u << at;
  }
  // Stores what was read since the last call. A barrier then shows it to the others.
  __device__ __forceinline__ void Land() {
#pragma unroll
    for (int at = 0; at < kMost; ++at) {
      if ((started_ >> at & 1) != 0) StoreShared16(to_[at], held_[at]);
    }
    started_ = 0;
  }

 private:
  uint4 held_[kMost];
  uint32_t to_[kMost];
  uint32_t started_ = 0;
};

}  // namespace awqd::cuda
