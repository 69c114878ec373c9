// The steps between the products of experts, and in the middle of a gated MLP: rows in the order of
// the experts, gate times up, and each token's rows summed.
//
// All stream through memory once: 16 bytes a thread where the rows allow it, coalesced along
// columns.
#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"

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
  const int64_t unit = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (unit >= units) return;
  for (int64_t row = blockIdx.y; row < a.count; row += gridDim.y) {
    static_cast<T*>(a.out)[row * units + unit] =
        static_cast<const T*>(a.in)[a.rows[row] * units + unit];
  }
}

__global__ __launch_bounds__(kThreads) void GateKernel(GateArgs a) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < a.count; i += step) {
    a.gate[i] *= a.up[i];
  }
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
