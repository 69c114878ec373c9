// Row sm80/plain_matmul: the product with a weight of any scheme in the layout "plain", slowly.
//
// One thread per output column and token, plain arithmetic in fp32, the same rounding of weights as
// everywhere: fp16 for FP16 and FP32 activations, bf16 for BF16. Limits: none.
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
      const float exact = PlainElement(w, i, n);
      const float weight = x_dtype == DType::kBf16 ? Bf16ToFloat(FloatToBf16(exact))
                                                   : HalfToFloat(FloatToHalf(exact));
      sum += LoadPlain(x, x_dtype, row * k + i) * weight;
    }
    StorePlain(y, y_dtype, row * w.n + n, bias == nullptr ? sum : sum + bias[n]);
  }
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

}  // namespace awqd::cuda
