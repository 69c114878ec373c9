// The steps between the products of experts, and in the middle of a gated MLP: rows in the order of
// the experts, gate times up, and each token's rows summed.
//
// All stream through memory once: 16 bytes a thread where the rows allow it, coalesced along
// columns.
#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/common/activate.cuh"
#include "kernels/cuda/common/half_rows.cuh"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"

// Kernels before a product let it begin at once: it brings its weights in meanwhile.
namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGridY = 65535;
constexpr int64_t kMaxBlocks = int64_t{1} << 16;

// Columns across, rows down: a block of rows that are too many for the grid takes several.
dim3 Grid(int64_t cols, int64_t rows) {
  return {static_cast<unsigned>(CeilDiv(cols, kThreads)),
          static_cast<unsigned>(std::min(rows, kMaxGridY))};
}

// `units`: of T in a row.
template <typename T>
__global__ __launch_bounds__(kThreads) void GatherKernel(GatherArgs a, int64_t units) {
  LaunchDependents();
  const int64_t unit = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (unit >= units) return;
  for (int64_t row = blockIdx.y; row < a.count; row += gridDim.y) {
    static_cast<T*>(a.out)[row * units + unit] =
        static_cast<const T*>(a.in)[a.rows[row] * units + unit];
  }
}

__global__ __launch_bounds__(kThreads) void GateKernel(GateArgs a) {
  LaunchDependents();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < a.count; i += step) {
    a.gate[i] = Activate(a.activation, a.gate[i]) * a.up[i];
  }
}

// A block has one row, and as many threads as it can: few rows are few blocks.
constexpr int kRowThreads = 1024;

__device__ __forceinline__ float4 Gated(const GateArgs& a, int64_t at) {
  const float4 gate = *reinterpret_cast<const float4*>(a.gate + at);
  const float4 up = *reinterpret_cast<const float4*>(a.up + at);
  return {Activate(a.activation, gate.x) * up.x, Activate(a.activation, gate.y) * up.y,
          Activate(a.activation, gate.z) * up.z, Activate(a.activation, gate.w) * up.w};
}

__device__ __forceinline__ float FiniteMagnitude(float v) {
  return fabsf(v) <= kLargestFloat ? fabsf(v) : 0;
}

// The larger magnitude of all threads, the same in every thread.
__device__ float LargestOfBlock(float largest) {
  __shared__ float by_warp[kRowThreads / 32];
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
  }
  if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kRowThreads / 32; ++w) largest = fmaxf(largest, by_warp[w]);
  return largest;
}

// `cols` is a multiple of 4. kKeeps: shared memory holds a row, so that gate and up are read once.
template <bool kKeeps>
__global__ __launch_bounds__(kRowThreads) void GateToHalfKernel(GateArgs a) {
  LaunchDependents();
  extern __shared__ float4 kept[];
  const int64_t row = blockIdx.x, first = row * a.cols;
  float largest = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x * 4; i < a.cols; i += kRowThreads * 4) {
    const float4 v = Gated(a, first + i);
    if (kKeeps) kept[i / 4] = v;
    largest = fmaxf(largest, fmaxf(fmaxf(FiniteMagnitude(v.x), FiniteMagnitude(v.y)),
                                   fmaxf(FiniteMagnitude(v.z), FiniteMagnitude(v.w))));
  }
  const int exponent = HalfExponent(LargestOfBlock(largest));
  const float down = ldexpf(1.0f, -exponent);
#pragma unroll 4
  for (int64_t i = threadIdx.x * 4; i < a.cols; i += kRowThreads * 4) {
    const float4 v = kKeeps ? kept[i / 4] : Gated(a, first + i);
    *reinterpret_cast<uint2*>(a.half + first + i) = {ToFp16x2(v.x * down, v.y * down),
                                                     ToFp16x2(v.z * down, v.w * down)};
  }
  if (threadIdx.x == 0) a.half_scale[row] = ldexpf(1.0f, exponent);
}

// The bits of the CPU: no fused multiply-adds.
__device__ __forceinline__ float Combined(const CombineArgs& a, int64_t row, int64_t col) {
  float sum = 0;
  for (int64_t j = row * a.terms; j < (row + 1) * a.terms; ++j) {
    const float value = a.in[a.rows[j] * a.cols + col];
    const float term = a.weights == nullptr ? value : __fmul_rn(a.weights[j], value);
    sum = j == row * a.terms ? term : __fadd_rn(sum, term);  // 0 + -0 would be +0
  }
  return sum;
}

__global__ __launch_bounds__(kThreads) void CombineKernel(CombineArgs a) {
  const int64_t col = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (col >= a.cols) return;
  for (int64_t row = blockIdx.y; row < a.count; row += gridDim.y) {
    const float value = Combined(a, row, col);
    const int64_t at = row * a.cols + col;
    if (a.y_dtype == DType::kFp32) {
      static_cast<float*>(a.y)[at] = value;
    } else {
      static_cast<uint16_t*>(a.y)[at] =
          (a.y_dtype == DType::kFp16 ? ToFp16x2(value, 0) : ToBf16x2(value, 0)) & 0xffff;
    }
  }
}

bool Aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T>
absl::Status LaunchGather(const GatherArgs& args, StreamView stream) {
  const int64_t units = args.row_bytes / static_cast<int64_t>(sizeof(T));
  const LaunchConfig config{.grid = Grid(units, args.count), .block = kThreads, .stream = stream};
  return Launch<GatherKernel<T>>("common/gather", config, args, units);
}

}  // namespace

absl::Status Gather(const GatherArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  if (args.row_bytes % 16 == 0 && Aligned(args.in) && Aligned(args.out)) {
    return LaunchGather<uint4>(args, stream);
  }
  return args.row_bytes % 2 == 0 ? LaunchGather<uint16_t>(args, stream)
                                 : LaunchGather<uint8_t>(args, stream);
}

absl::Status Gate(const GateArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  if (args.half != nullptr) {
    // Two blocks of a multiprocessor.
    constexpr int64_t kMostKept = 96 * 1024;
    LaunchConfig config{.grid = static_cast<unsigned>(args.count / args.cols),
                        .block = kRowThreads,
                        .stream = stream};
    if (args.cols * 4 > kMostKept) {
      return Launch<GateToHalfKernel<false>>("common/gate", config, args);
    }
    config.shared_bytes = args.cols * 4;
    return Launch<GateToHalfKernel<true>>("common/gate", config, args);
  }
  const auto blocks = static_cast<unsigned>(std::min(CeilDiv(args.count, kThreads), kMaxBlocks));
  return Launch<GateKernel>("common/gate", {.grid = blocks, .block = kThreads, .stream = stream},
                            args);
}

absl::Status Combine(const CombineArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  const LaunchConfig config{
      .grid = Grid(args.cols, args.count), .block = kThreads, .stream = stream};
  return Launch<CombineKernel>("common/combine", config, args);
}

}  // namespace awqd::cuda
