// Row sm80/plain_dequantize: W[K, N] of any scheme from the layout "plain", slowly.
//
// One thread per output column and row, plain arithmetic in fp32. Limits: none.
#include "kernels/cuda/sm80/plain.cuh"

namespace awqd::cuda {
namespace {

__global__ __launch_bounds__(kPlainThreads) void PlainDequantize(PlainWeight w, void* out,
                                                                 DType dtype, int64_t rows,
                                                                 int64_t cols, int64_t row_begin,
                                                                 int64_t col_begin) {
  const int64_t col = blockIdx.x * int64_t{kPlainThreads} + threadIdx.x;
  if (col >= cols) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    StorePlain(out, dtype, row * cols + col, PlainElement(w, row_begin + row, col_begin + col));
  }
}

absl::Status RunDequantize(const DequantizeArgs& args, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(args.weight->device->info().index));
  const LaunchConfig config{
      .grid = PlainGrid(args.out.cols, args.out.rows), .block = kPlainThreads, .stream = stream};
  return Launch<PlainDequantize>("sm80/plain_dequantize", config, ViewPlain(*args.weight),
                                 args.out.data, args.out.dtype, args.out.rows, args.out.cols,
                                 args.row_begin, args.col_begin);
}

}  // namespace

const KernelRow& PlainDequantizeRow() {
  static const KernelRow row = [] {
    KernelRow out = PlainRow("sm80/plain_dequantize", Op::kDequantize);
    out.dequantize = RunDequantize;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
