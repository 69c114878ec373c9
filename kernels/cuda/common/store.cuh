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

}  // namespace awqd::cuda
