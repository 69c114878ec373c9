// The transform of activations, which runs before the prologue: a row times the weight's factor,
// and blocks of the product times a Hadamard matrix. Its bits are those of TransformBlock.
#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 8;                 // elements of a thread
constexpr int kWarpRows = 32 * kRun;    // the largest block that a warp holds in registers
constexpr int kStep = kThreads * kRun;  // elements that all threads hold

struct Rows {
  const void* x;  // [rows, k]
  DType dtype;
  const float* factor;  // or null
  int64_t k;
  int size;
  float scale;
  void* out;
  DType out_dtype;
  int tile;   // elements of a thread block: whole Hadamard blocks and whole steps
  bool wide;  // runs of 16-bit elements lie on 16 bytes in x
};

__device__ __forceinline__ float Widen(uint16_t bits, DType dtype) {
  return dtype == DType::kFp16 ? Fp16ToFloat(bits) : Bf16ToFloat(bits);
}

// A run of a row, zero from K on. A product is rounded before it is added.
__device__ __forceinline__ void LoadRun(const Rows& s, int64_t row, int64_t first,
                                        float (&v)[kRun]) {
  const int64_t at = row * s.k + first;
  if (s.wide && first < s.k) {
    const uint4 run = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(s.x) + at);
    const uint32_t pairs[kRun / 2] = {run.x, run.y, run.z, run.w};
#pragma unroll
    for (int i = 0; i < kRun; ++i) v[i] = Widen(pairs[i / 2] >> i % 2 * 16 & 0xffff, s.dtype);
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      v[i] = first + i >= s.k          ? 0.0f
             : s.dtype == DType::kFp32 ? static_cast<const float*>(s.x)[at + i]
                                       : Widen(static_cast<const uint16_t*>(s.x)[at + i], s.dtype);
    }
  }
  if (s.factor == nullptr) return;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (first + i < s.k) v[i] = __fmul_rn(v[i], s.factor[first + i]);
  }
}

// Butterflies of distances up to 128, in a warp's registers.
__device__ __forceinline__ void TransformRun(int size, float (&v)[kRun]) {
#pragma unroll
  for (int apart = 1; apart < kRun; apart *= 2) {
    if (apart >= size) return;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if ((i & apart) != 0) continue;
      const float a = v[i], b = v[i + apart];
      v[i] = a + b;
      v[i + apart] = a - b;
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    if (lanes * kRun >= size) return;
    const bool second = (threadIdx.x & lanes) != 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const float other = __shfl_xor_sync(0xffffffff, v[i], lanes);
      v[i] = second ? other - v[i] : v[i] + other;
    }
  }
}

__device__ __forceinline__ uint32_t ToPair(float low, float high, DType dtype) {
  return dtype == DType::kFp16 ? ToFp16x2(low, high) : ToBf16x2(low, high);
}

// Rows of whole runs begin on 16 bytes.
__device__ __forceinline__ void StoreRun(const Rows& s, int64_t row, int64_t first,
                                         float (&v)[kRun]) {
  if (first >= s.k) return;
  const int64_t at = row * s.k + first;
  float* const floats = static_cast<float*>(s.out) + at;
  uint16_t* const halves = static_cast<uint16_t*>(s.out) + at;
#pragma unroll
  for (int i = 0; i < kRun; ++i) v[i] *= s.scale;
  if (s.k % kRun != 0) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (first + i >= s.k) return;
      if (s.out_dtype == DType::kFp32) {
        floats[i] = v[i];
      } else {
        halves[i] = ToPair(v[i], 0, s.out_dtype) & 0xffff;
      }
    }
  } else if (s.out_dtype == DType::kFp32) {
    reinterpret_cast<float4*>(floats)[0] = {v[0], v[1], v[2], v[3]};
    reinterpret_cast<float4*>(floats)[1] = {v[4], v[5], v[6], v[7]};
  } else {
    *reinterpret_cast<uint4*>(halves) = {
        ToPair(v[0], v[1], s.out_dtype), ToPair(v[2], v[3], s.out_dtype),
        ToPair(v[4], v[5], s.out_dtype), ToPair(v[6], v[7], s.out_dtype)};
  }
}

// blockIdx.x = the row, blockIdx.y = its tile. Blocks beyond a warp's go through shared memory,
// `tile` elements of it.
__global__ __launch_bounds__(kThreads) void TransformTiles(const __grid_constant__ Rows s) {
  extern __shared__ float shared[];
  LaunchDependents();
  const int64_t row = blockIdx.x, begin = int64_t{blockIdx.y} * s.tile;
  const bool in_warps = s.size <= kWarpRows;
  float v[kRun];
  for (int at = static_cast<int>(threadIdx.x) * kRun; at < s.tile; at += kStep) {
    LoadRun(s, row, begin + at, v);
    TransformRun(s.size, v);
    if (in_warps) {
      StoreRun(s, row, begin + at, v);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) shared[at + i] = v[i];
  }
  if (in_warps) return;
  for (int apart = kWarpRows; apart < s.size; apart *= 2) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < s.tile / 2; i += kThreads) {
      const int first = i / apart * 2 * apart + i % apart;
      const float a = shared[first], b = shared[first + apart];
      shared[first] = a + b;
      shared[first + apart] = a - b;
    }
  }
  __syncthreads();
  for (int at = static_cast<int>(threadIdx.x) * kRun; at < s.tile; at += kStep) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) v[i] = shared[at + i];
    StoreRun(s, row, begin + at, v);
  }
}

}  // namespace

absl::StatusOr<ConstMatrixView> TransformRows(const TransformArgs& args, Device& device,
                                              StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  const ConstMatrixView& x = args.x;
  const bool bytes = args.form == InputForm::kTensorCoreIntegers ||
                     args.form == InputForm::kQuantized ||
                     args.form == InputForm::kTensorCoreFloat8;
  const int size = static_cast<int>(args.hadamard.size), tile = std::max(size, kStep);
  const Rows rows = {.x = x.data,
                     .dtype = x.dtype,
                     .factor = args.factor,
                     .k = x.cols,
                     .size = size,
                     .scale = args.hadamard.scale,
                     .out = args.out,
                     .out_dtype = bytes ? DType::kFp32 : x.dtype,
                     .tile = tile,
                     .wide = x.dtype != DType::kFp32 && x.cols % kRun == 0 &&
                             reinterpret_cast<uintptr_t>(x.data) % 16 == 0};
  const LaunchConfig config{.grid = {static_cast<unsigned>(x.rows),
                                     static_cast<unsigned>(CeilDiv(x.cols, int64_t{tile}))},
                            .block = kThreads,
                            .shared_bytes = size <= kWarpRows ? 0 : tile * int64_t{4},
                            .stream = stream};
  AWQD_RETURN_IF_ERROR(Launch<TransformTiles>("common/transform", config, rows));
  return ConstMatrixView{args.out, rows.out_dtype, x.rows, x.cols};
}

}  // namespace awqd::cuda
