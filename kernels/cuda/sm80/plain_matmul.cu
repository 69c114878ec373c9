// Rows sm80/plain_matmul, sm80/plain_qmatmul_a8 and sm80/plain_qmatmul_a8_scaled: the products with
// any weight in the layout "plain", slowly.
//
// One thread per output column and token, plain arithmetic with the exact weight: in FP32, of INT8
// activations in INT32, or of quantised ones in 64-bit integers over each group. An FP32 sum that
// overflows is computed once more in FP64.
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
    if (!isfinite(sum)) {
      double exact = 0;
      for (int64_t i = 0; i < k; ++i) {
        exact += double{LoadPlain(x, x_dtype, row * k + i)} * PlainElement(w, i, n);
      }
      sum = static_cast<float>(exact);
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

// Of one column over [begin, end) of K, which one scale serves: exact sums of q * code and of q.
struct GroupSums {
  int64_t codes = 0;
  int64_t tokens = 0;
};
__device__ GroupSums SumGroup(const PlainWeight& w, const int8_t* x, int64_t begin, int64_t end,
                              int64_t n) {
  GroupSums out;
  for (int64_t i = begin; i < end; ++i) {
    out.codes += x[i] * static_cast<int32_t>(PlainCode(w, i, n));
    out.tokens += x[i];
  }
  return out;
}

// In double, because what a zero takes off may be nearly all of a sum.
__device__ double Scaled(const PlainWeight& w, const GroupSums& sums, int64_t group, int64_t n) {
  const PlainScale s = PlainScaleOf(w, group, n);
  return w.zero_kind == ZeroKind::kRealAfter
             ? sums.codes * double{s.scale} - double{s.zero} * sums.tokens
             : (sums.codes - double{s.zero} * sums.tokens) * double{s.scale};
}

__global__ __launch_bounds__(kPlainThreads) void PlainScaled(PlainWeight w, const int8_t* x,
                                                             const float* x_scale, void* y,
                                                             DType y_dtype, const float* bias,
                                                             int64_t m, int64_t k) {
  const int64_t n = blockIdx.x * int64_t{kPlainThreads} + threadIdx.x;
  if (n >= w.n) return;
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    double sum = 0;
    for (int64_t begin = 0; begin < k; begin += w.group_rows) {
      const int64_t end = min(begin + w.group_rows, k);
      sum += Scaled(w, SumGroup(w, x + row * k, begin, end, n), begin / w.group_rows, n);
    }
    if (w.outer != nullptr) sum *= w.outer[n];
    const float value = static_cast<float>(sum) * x_scale[row];
    StorePlain(y, y_dtype, row * w.n + n, bias == nullptr ? value : value + bias[n]);
  }
}

absl::Status RunScaled(const MatmulArgs& args, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(args.weight->device->info().index));
  const LaunchConfig config{
      .grid = PlainGrid(args.y.cols, args.y.rows), .block = kPlainThreads, .stream = stream};
  return Launch<PlainScaled>("sm80/plain_qmatmul_a8_scaled", config, ViewPlain(*args.weight),
                             static_cast<const int8_t*>(args.x.data), args.x_scale, args.y.data,
                             args.y.dtype, args.bias, args.x.rows, args.x.cols);
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

const KernelRow& PlainQMatmulA8ScaledRow() {
  static const KernelRow row = [] {
    KernelRow out = PlainRow("sm80/plain_qmatmul_a8_scaled", Op::kQuantizedActivations);
    out.claims = kIntegerCodes;
    out.staged = Staged::kQuantized;
    out.inputs = kFloatingMask | MaskOf(DType::kInt8);
    out.batch_invariant = true;
    out.matmul = RunScaled;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
