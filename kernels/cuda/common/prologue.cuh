// Device code that the prologues share: elements of x', runs of 16 of them, the largest of a row.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/cuda/common/integers.h"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/types.h"

namespace awqd::cuda {
namespace {

constexpr int kMostRunThreads = 1024;
constexpr int kInfinityBits = 0x7f800000;

__device__ __forceinline__ float CodeToFloat(uint32_t e4m3) {
  const __half_raw half =
      __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(e4m3 & 0xff), __NV_E4M3);
  return Fp16ToFloat(half.x);
}

// Element i of a row of x', in FP32.
struct Reader {
  const void* x;
  DType dtype;
  const int32_t* order;  // or null
  const float* factor;   // or null
  int64_t k;

  __device__ __forceinline__ float At(int64_t row, int64_t i) const {
    const int64_t from = order == nullptr ? i : order[i];
    const int64_t at = row * k + from;
    float value;
    if (dtype == DType::kFp32) {
      value = static_cast<const float*>(x)[at];
    } else if (dtype == DType::kE4m3) {
      value = CodeToFloat(static_cast<const uint8_t*>(x)[at]);
    } else {
      const uint16_t bits = static_cast<const uint16_t*>(x)[at];
      value = dtype == DType::kFp16 ? Fp16ToFloat(bits) : Bf16ToFloat(bits);
    }
    return factor == nullptr ? value : value * factor[from];
  }
};

// A run of 16-bit elements in FP32.
__device__ __forceinline__ void WidenRun(const uint4 (&run)[2], DType dtype,
                                         float (&v)[kIntegerRun]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t pairs[4] = {run[half].x, run[half].y, run[half].z, run[half].w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint16_t bits = pairs[i / 2] >> (i % 2 * 16) & 0xffff;
      v[half * 8 + i] = dtype == DType::kFp16 ? Fp16ToFloat(bits) : Bf16ToFloat(bits);
    }
  }
}

// A run of 16 elements of x', zero from K on. `wide`: they lie together on 16 bytes.
__device__ __forceinline__ void LoadRun(const Reader& x, int64_t row, int64_t first, bool wide,
                                        float (&v)[kIntegerRun]) {
  if (!wide || first + kIntegerRun > x.k) {
#pragma unroll
    for (int i = 0; i < kIntegerRun; ++i) v[i] = first + i < x.k ? x.At(row, first + i) : 0.0f;
    return;
  }
  const int64_t at = row * x.k + first;
  if (x.dtype == DType::kE4m3) {
    const uint4 run = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(x.x) + at);
    const uint32_t words[4] = {run.x, run.y, run.z, run.w};
#pragma unroll
    for (int i = 0; i < kIntegerRun; ++i) v[i] = CodeToFloat(words[i / 4] >> (i % 4 * 8));
    return;
  }
  if (x.dtype == DType::kFp32) {
    const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(x.x) + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = from[i];
      v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
    return;
  }
  const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x.x) + at);
  const uint4 run[2] = {from[0], from[1]};
  WidenRun(run, x.dtype, v);
}

__device__ __forceinline__ int LargestOfWarp(int v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffff, v);
#else
  for (int apart = 16; apart > 0; apart /= 2) v = max(v, __shfl_xor_sync(0xffffffff, v, apart));
  return v;
#endif
}

// The bits of the largest magnitude of all threads, which order magnitudes as integers do, those of
// an infinity and of NaNs last. The same in every thread.
__device__ int LargestOfBlock(int largest) {
  __shared__ int by_warp[kMostRunThreads / 32];
  largest = LargestOfWarp(largest);
  if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  for (unsigned w = 0; w < blockDim.x / 32; ++w) largest = max(largest, by_warp[w]);
  return largest;
}

__device__ __forceinline__ int LargestOfRun(const float (&v)[kIntegerRun], int largest) {
#pragma unroll
  for (int i = 0; i < kIntegerRun; ++i) largest = max(largest, __float_as_int(v[i]) & 0x7fffffff);
  return largest;
}

inline bool RowsOnSixteenBytes(const ConstMatrixView& x) {
  return x.cols * SizeOf(x.dtype) % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

}  // namespace
}  // namespace awqd::cuda
