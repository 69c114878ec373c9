// Widening and finishing for the dense path.
//
// Both stream through memory once, one element per thread and step, coalesced along columns. They
// run only for FP32 activations, for a bias, and for outputs that cuBLASLt does not write.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/dense/finish.h"

namespace awqd::dense {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGridY = 65535;
// Enough blocks for any GPU of today; the rest is walked.
constexpr int64_t kMaxBlocks = 4096;

template <typename T>
__device__ T Round(float value);
template <>
__device__ float Round<float>(float value) {
  return value;
}
template <>
__device__ __half Round<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __nv_bfloat16 Round<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

__global__ void __launch_bounds__(kThreads)
    WidenKernel(const __half* __restrict__ narrow, float* __restrict__ wide, int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    wide[i] = __half2float(narrow[i]);
  }
}

// `sums` and `y` may be the same memory: each element is read and written by one thread.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    FinishKernel(const float* sums, int64_t ld_sums, const float* __restrict__ bias, T* y,
                 int64_t ld_y, int64_t rows, int64_t cols) {
  const int64_t col = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (col >= cols) return;
  const float add = bias != nullptr ? bias[col] : 0.0f;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const float sum = sums[row * ld_sums + col];
    // Not sum + 0: that would turn -0 into +0.
    y[row * ld_y + col] = Round<T>(bias != nullptr ? sum + add : sum);
  }
}

template <typename T>
absl::Status FinishAs(const FinishArgs& a, StreamView stream) {
  const dim3 grid(static_cast<unsigned>(CeilDiv(a.cols, kThreads)),
                  static_cast<unsigned>(std::min(a.rows, kMaxGridY)));
  return cuda::Launch<FinishKernel<T>>("dense finish", {grid, dim3(kThreads), 0, stream}, a.sums,
                                       a.ld_sums, a.bias, static_cast<T*>(a.y), a.ld_y, a.rows,
                                       a.cols);
}

}  // namespace

absl::Status Widen(const void* narrow, float* wide, int64_t count, StreamView stream) {
  const int64_t blocks = std::min(CeilDiv(count, kThreads), kMaxBlocks);
  return cuda::Launch<WidenKernel>("dense widen",
                                   {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream},
                                   static_cast<const __half*>(narrow), wide, count);
}

absl::Status Finish(const FinishArgs& args, StreamView stream) {
  switch (args.out) {
    case DType::kFp16:
      return FinishAs<__half>(args, stream);
    case DType::kBf16:
      return FinishAs<__nv_bfloat16>(args, stream);
    default:
      return FinishAs<float>(args, stream);
  }
}

}  // namespace awqd::dense
