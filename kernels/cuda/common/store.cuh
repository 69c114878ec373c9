// Stores of results whose type is known when the kernel runs. Device code only.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/packed.cuh"
#include "kernels/types.h"

namespace awqd::cuda {

// Element `at` of FP16, BF16 or FP32 data, rounded.
__device__ __forceinline__ void StoreAs(DType type, void* data, int64_t at, float value) {
  if (type == DType::kFp32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<uint16_t*>(data)[at] = static_cast<uint16_t>(
        type == DType::kFp16 ? ToFp16x2(value, value) : ToBf16x2(value, value));
  }
}

// Elements [at, at + 4), rounded, of which the first `count` exist. `aligned`: data lies on a boundary
// of 16 bytes and `at` is a multiple of 4.
__device__ __forceinline__ void StoreFourAs(DType type, void* data, int64_t at, const float (&v)[4],
                                            int64_t count, bool aligned) {
  if (!aligned || count < 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) StoreAs(type, data, at + i, v[i]);
    }
  } else if (type == DType::kFp32) {
    *reinterpret_cast<float4*>(static_cast<float*>(data) + at) = {v[0], v[1], v[2], v[3]};
  } else {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(data) + at) =
        type == DType::kFp16 ? uint2{ToFp16x2(v[0], v[1]), ToFp16x2(v[2], v[3])}
                             : uint2{ToBf16x2(v[0], v[1]), ToBf16x2(v[2], v[3])};
  }
}

}  // namespace awqd::cuda
