// Stage: what is done to activations before a row of the registry reads them. Order and factor of
// the weight, and for tensor cores 16 bits, rows that begin on 16 bytes, zeros behind them.
#include "kernels/base/math.h"
#include "kernels/cuda/common/integers.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kLargest = 3.4028235e38f;

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
    } else {
      const uint16_t bits = static_cast<const uint16_t*>(x)[at];
      value = dtype == DType::kFp16 ? Fp16ToFloat(bits) : Bf16ToFloat(bits);
    }
    return factor == nullptr ? value : value * factor[from];
  }
};

// The largest finite magnitude of a row, the same in every thread.
__device__ float LargestFinite(const Reader& x, int64_t row) {
  __shared__ float by_warp[kThreads / 32];
  float largest = 0;
  for (int64_t i = threadIdx.x; i < x.k; i += kThreads) {
    const float v = fabsf(x.At(row, i));
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

// FP32 rows become fp16 times a power of two of their own (in `scale`), so that no finite value
// overflows and rounding is relative to the row's largest. Block = one row. Exponents: the row's
// largest goes to [2^14, 2^15), half of what fp16 can hold.
__global__ __launch_bounds__(kThreads) void StageAsFp16(Reader x, uint16_t* out, int64_t stride,
                                                        float* scale) {
  const int64_t row = blockIdx.x;
  const float largest = LargestFinite(x, row);
  const int exponent = largest == 0 ? 0 : max(-100, ilogbf(largest) - 14);
  const float down = ldexpf(1.0f, -exponent);
  for (int64_t i = threadIdx.x; i < stride; i += kThreads) {
    out[row * stride + i] = ToFp16x2(i < x.k ? x.At(row, i) * down : 0.0f, 0) & 0xffff;
  }
  if (threadIdx.x == 0) scale[row] = ldexpf(1.0f, exponent);
}

// Rows in their own type, zero from K to the stride. Block = one row.
__global__ __launch_bounds__(kThreads) void StageInPlace(Reader x, void* out, int64_t stride) {
  const int64_t row = blockIdx.x;
  for (int64_t i = threadIdx.x; i < stride; i += kThreads) {
    const float value = i < x.k ? x.At(row, i) : 0.0f;
    const int64_t at = row * stride + i;
    if (x.dtype == DType::kFp32) {
      static_cast<float*>(out)[at] = value;
    } else {
      static_cast<uint16_t*>(out)[at] =
          (x.dtype == DType::kFp16 ? ToFp16x2(value, 0) : ToBf16x2(value, 0)) & 0xffff;
    }
  }
}

// INT8 keeps its type; `reordered`: of a tensor core. Block = one row.
__global__ __launch_bounds__(kThreads) void StageIntegers(Reader x, int8_t* out, int64_t stride,
                                                          bool reordered) {
  const int64_t row = blockIdx.x;
  for (int64_t at = threadIdx.x; at < stride; at += kThreads) {
    const int place = static_cast<int>(at % kIntegerRun);
    const int64_t i = reordered ? at - place + IntegerSource(place) : at;
    int8_t value = 0;
    if (i < x.k) {
      const int64_t from = x.order == nullptr ? i : x.order[i];
      value = static_cast<const int8_t*>(x.x)[row * x.k + from];
    }
    out[row * stride + at] = value;
  }
}

int64_t Stride(Staged want, int64_t k) {
  if (want == Staged::kTensorCoreIntegers) return RoundUp(k, kIntegerBlock);
  return want == Staged::kTensorCore ? RoundUp(k, 8) : k;
}

}  // namespace

bool TokensAreReady(Staged want, const ConstMatrixView& x) {
  if (want == Staged::kAny) return true;
  if (want == Staged::kTensorCoreIntegers) return false;
  return x.dtype != DType::kFp32 && x.cols % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

int64_t StagedBytes(Staged want, int64_t m, int64_t k) {
  const int64_t element = want == Staged::kAny ? 4 : 2;
  return RoundUp(m * Stride(want, k) * element, 256) + RoundUp(m * 4, 256);
}

absl::Status Stage(const StageArgs& args, StagedTokens* out, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  const ConstMatrixView& x = args.x;
  const int64_t stride = Stride(args.want, x.cols);
  const LaunchConfig config{
      .grid = static_cast<unsigned>(x.rows), .block = kThreads, .stream = stream};
  const Reader reader = {x.data, x.dtype, args.order, args.factor, x.cols};
  out->x = {args.out, x.dtype, x.rows, x.cols};
  out->stride = stride;
  if (x.dtype == DType::kInt8) {
    return Launch<StageIntegers>("common/stage", config, reader, static_cast<int8_t*>(args.out),
                                 stride, args.want == Staged::kTensorCoreIntegers);
  }
  if (args.want == Staged::kAny || x.dtype != DType::kFp32) {
    return Launch<StageInPlace>("common/stage", config, reader, args.out, stride);
  }
  out->x.dtype = DType::kFp16;
  float* const scale =
      reinterpret_cast<float*>(static_cast<char*>(args.out) + RoundUp(x.rows * stride * 2, 256));
  out->scale = scale;
  return Launch<StageAsFp16>("common/stage", config, reader, static_cast<uint16_t*>(args.out),
                             stride, scale);
}

}  // namespace awqd::cuda
