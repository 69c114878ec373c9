// Finish: the bias, the activation function and the one rounding, where a row leaves FP32 sums. And
// the rows of a decoded block in the order of in-features.
//
// All stream through memory once, one element per thread and step, coalesced along columns.
#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/cuda/common/activate.cuh"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGridY = 65535;

dim3 Grid(int64_t cols, int64_t rows) {
  return {static_cast<unsigned>(CeilDiv(cols, kThreads)),
          static_cast<unsigned>(std::min(rows, kMaxGridY))};
}

// `sums` and `y` may be the same memory: each element is read and written by one thread.
__global__ __launch_bounds__(kThreads) void FinishKernel(EpilogueArgs a) {
  const int64_t col = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (col >= a.cols) return;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const float sum = a.sums[row * a.ld_sums + col];
    // Not sum + 0: that would turn -0 into +0.
    const float value = Activate(a.activation, a.bias != nullptr ? sum + a.bias[col] : sum);
    const int64_t at = row * a.ld_y + col;
    if (a.y_dtype == DType::kFp32) {
      static_cast<float*>(a.y)[at] = value;
    } else {
      static_cast<uint16_t*>(a.y)[at] =
          (a.y_dtype == DType::kFp16 ? ToFp16x2(value, 0) : ToBf16x2(value, 0)) & 0xffff;
    }
  }
}

template <typename T>
__global__ __launch_bounds__(kThreads) void ReorderKernel(ReorderArgs a) {
  const int64_t col = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (col >= a.cols) return;
  for (int64_t row = blockIdx.y; row < a.k; row += gridDim.y) {
    const int64_t to = a.order[row] - a.row_begin;
    if (to < 0 || to >= a.rows) continue;
    static_cast<T*>(a.out)[to * a.ld_out + col] = static_cast<const T*>(a.in)[row * a.cols + col];
  }
}

}  // namespace

absl::Status Finish(const EpilogueArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  const LaunchConfig config{
      .grid = Grid(args.cols, args.rows), .block = kThreads, .stream = stream};
  return Launch<FinishKernel>("common/finish", config, args);
}

absl::Status Reorder(const ReorderArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  const LaunchConfig config{.grid = Grid(args.cols, args.k), .block = kThreads, .stream = stream};
  return args.element_bytes == 4 ? Launch<ReorderKernel<uint32_t>>("common/reorder", config, args)
                                 : Launch<ReorderKernel<uint16_t>>("common/reorder", config, args);
}

}  // namespace awqd::cuda

namespace awqd {

const Steps& CudaSteps() {
  static const Steps steps = {cuda::TokensAreReady, cuda::PrologueBytes, cuda::Stage,
                              cuda::Finish,         cuda::Reorder,       cuda::Gather,
                              cuda::Gate,           cuda::Combine};
  return steps;
}

}  // namespace awqd
