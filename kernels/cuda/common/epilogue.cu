// The epilogue: adds the bias, applies the activation function and rounds once, where a row leaves
// FP32 sums. It also brings the rows of a decoded block into the order of in-features.
//
// Both stream through memory once, one element per thread and step, coalesced along columns.
#include "kernels/cuda/common/grouped.h"
#include "kernels/cuda/common/packed.cuh"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/exact.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 256;

// `sums` and `y` may be the same memory: each element is read and written by one thread.
__global__ __launch_bounds__(kThreads) void EpilogueKernel(EpilogueArgs a) {
  const int64_t col = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (col >= a.cols) return;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    if (!a.mask.Has(row)) continue;
    const float sum = a.sums[row * a.ld_sums + col];
    // Not sum + 0: that would turn -0 into +0.
    const float value = ActivateFloat(a.activation, a.bias != nullptr ? sum + a.bias[col] : sum);
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

absl::Status RunEpilogue(const EpilogueArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  const LaunchConfig config{
      .grid = GridOfRows(args.cols, args.rows, kThreads), .block = kThreads, .stream = stream};
  return Launch<EpilogueKernel>("common/epilogue", config, args);
}

absl::Status ReorderRows(const ReorderArgs& args, Device& device, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(device.info().index));
  const LaunchConfig config{
      .grid = GridOfRows(args.cols, args.k, kThreads), .block = kThreads, .stream = stream};
  return args.element_bytes == 4 ? Launch<ReorderKernel<uint32_t>>("common/epilogue", config, args)
                                 : Launch<ReorderKernel<uint16_t>>("common/epilogue", config, args);
}

}  // namespace awqd::cuda

namespace awqd {

const Steps& CudaSteps() {
  static const Steps steps = {
      cuda::TransformRows,      cuda::NeedsNoPrologue, cuda::PrologueBytes, cuda::RunPrologue,
      cuda::RunEpilogue,        cuda::ReorderRows,     cuda::GatherRows,    cuda::MultiplyByUp,
      cuda::GateTokens,         cuda::CombineRows,     cuda::SortChoices,   cuda::MakeGroupedTable,
      sizeof(cuda::GroupedTile)};
  return steps;
}

}  // namespace awqd
