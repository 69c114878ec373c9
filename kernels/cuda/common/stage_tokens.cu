// Copies or converts activations that the tensor cores cannot read in place: FP32, or rows off
// 16-byte boundaries.
#include "kernels/base/math.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/stage_tokens.h"
#include "kernels/cuda/core/launch.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kLargest = 3.4028235e38f;

// The largest finite magnitude of a row, the same in every thread.
__device__ float LargestFinite(const float* row, int64_t k) {
  __shared__ float by_warp[kThreads / 32];
  float largest = 0;
  for (int64_t i = threadIdx.x; i < k; i += kThreads) {
    const float v = fabsf(row[i]);
    if (v <= kLargest) largest = fmaxf(largest, v);
  }
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
  }
  if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) largest = fmaxf(largest, by_warp[w]);
  return largest;
}

// Block = one row. Exponents: the row's largest goes to [2^14, 2^15), half of what fp16 can hold.
__global__ __launch_bounds__(kThreads) void StageFp32(const float* x, int64_t k, uint16_t* out,
                                                      int64_t stride, float* scale) {
  const float* row = x + blockIdx.x * k;
  const float largest = LargestFinite(row, k);
  const int exponent = largest == 0 ? 0 : max(-100, ilogbf(largest) - 14);
  const float down = ldexpf(1.0f, -exponent);
  for (int64_t i = threadIdx.x; i < stride; i += kThreads) {
    out[blockIdx.x * stride + i] = ToFp16x2(i < k ? row[i] * down : 0.0f, 0) & 0xffff;
  }
  if (threadIdx.x == 0) scale[blockIdx.x] = ldexpf(1.0f, exponent);
}

__global__ __launch_bounds__(kThreads) void StageCopy(const uint16_t* x, int64_t k, uint16_t* out,
                                                      int64_t stride, float* scale) {
  for (int64_t i = threadIdx.x; i < stride; i += kThreads) {
    out[blockIdx.x * stride + i] = i < k ? x[blockIdx.x * k + i] : 0;
  }
  if (threadIdx.x == 0) scale[blockIdx.x] = 1.0f;
}

}  // namespace

bool TokensAreReady(const ConstMatrixView& x) {
  return x.dtype != DType::kFp32 && x.cols % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

int64_t StagedTokensBytes(int64_t m, int64_t k) {
  return RoundUp(m * RoundUp(k, 8) * 2, 256) + RoundUp(m * 4, 256);
}

StagedTokens CarveStagedTokens(void* workspace, int64_t m, int64_t k) {
  const int64_t stride = RoundUp(k, 8);
  uint8_t* base = static_cast<uint8_t*>(workspace);
  return {base, stride, reinterpret_cast<float*>(base + RoundUp(m * stride * 2, 256))};
}

absl::Status StageTokens(const ConstMatrixView& x, const StagedTokens& out, StreamView stream) {
  const LaunchConfig config{
      .grid = static_cast<unsigned>(x.rows), .block = kThreads, .stream = stream};
  uint16_t* data = static_cast<uint16_t*>(out.data);
  if (x.dtype == DType::kFp32) {
    return Launch<StageFp32>("common/stage_tokens", config, static_cast<const float*>(x.data),
                             x.cols, data, out.stride, out.scale);
  }
  return Launch<StageCopy>("common/stage_tokens", config, static_cast<const uint16_t*>(x.data),
                           x.cols, data, out.stride, out.scale);
}

}  // namespace awqd::cuda
