// Rows sm80/plain_matmul and sm80/plain_qmatmul_a8: the products with any weight in the layout
// "plain", slowly.
//
// One thread per output column and token, plain arithmetic with the exact weight: in fp32, or of
// INT8 activations in INT32.
// Limits: none.
#include "kernels/cuda/sm80/plain.cuh"

namespace awqd::cuda {
namespace {

__global__ __launch_bounds__(kPlainThreads) void PlainMatmul(PlainWeight w, const void* x,
                                                             DType x_dtype, void* y, DType y_dtype,
                                                             const float* bias, int64_t m,
                                                             int64_t k) {
  const int64_t n = blockIdx.x * int64_t{kPlainThreads} + threadIdx.x;
  if (n >= w.n) return;
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    float sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      sum += LoadPlain(x, x_dtype, row * k + i) * PlainElement(w, i, n);
    }
    StorePlain(y, y_dtype, row * w.n + n, bias == nullptr ? sum : sum + bias[n]);
  }
}

__global__ __launch_bounds__(kPlainThreads) void PlainIntegers(PlainWeight w, const int8_t* x,
                                                               int32_t* y, int64_t m, int64_t k) {
  const int64_t n = blockIdx.x * int64_t{kPlainThreads} + threadIdx.x;
  if (n >= w.n) return;
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      sum += x[row * k + i] * static_cast<int32_t>(PlainElement(w, i, n));
    }
    y[row * w.n + n] = sum;
  }
}

absl::Status RunIntegers(const MatmulArgs& args, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(args.weight->device->info().index));
  const LaunchConfig config{
      .grid = PlainGrid(args.y.cols, args.y.rows), .block = kPlainThreads, .stream = stream};
  return Launch<PlainIntegers>("sm80/plain_qmatmul_a8", config, ViewPlain(*args.weight),
                               static_cast<const int8_t*>(args.x.data),
                               static_cast<int32_t*>(args.y.data), args.x.rows, args.x.cols);
}

absl::Status RunMatmul(const MatmulArgs& args, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(args.weight->device->info().index));
  const LaunchConfig config{
      .grid = PlainGrid(args.y.cols, args.y.rows), .block = kPlainThreads, .stream = stream};
  return Launch<PlainMatmul>("sm80/plain_matmul", config, ViewPlain(*args.weight), args.x.data,
                             args.x.dtype, args.y.data, args.y.dtype, args.bias, args.x.rows,
                             args.x.cols);
}

}  // namespace

const KernelRow& PlainMatmulRow() {
  static const KernelRow row = [] {
    KernelRow out = PlainRow("sm80/plain_matmul", Op::kMatmul);
    out.batch_invariant = true;
    out.matmul = RunMatmul;
    return out;
  }();
  return row;
}

const KernelRow& PlainQMatmulA8Row() {
  static const KernelRow row = [] {
    KernelRow out = PlainRow("sm80/plain_qmatmul_a8", Op::kIntegerMatmul);
    out.claims = kIntegers;
    out.inputs = MaskOf(DType::kInt8);
    out.outputs = MaskOf(DType::kInt32);
    out.batch_invariant = true;
    out.matmul = RunIntegers;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
