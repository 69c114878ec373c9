// Rows sm80/plain_dequantize and sm80/plain_matmul: every scheme in the layout "plain", slowly.
//
// They serve what the tensor-core layout refuses: other code widths, group sizes that are no
// multiple of 16, BF16 and FP32 scales. One thread per output column and row (of K, or of tokens),
// plain arithmetic in fp32, the same rounding of weights as everywhere: fp16 for FP16 and FP32
// activations, bf16 for BF16. Limits: none. Speed was not a goal.
#include "kernels/base/half.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/plain.h"

namespace awqd::cuda {
namespace {

constexpr int kThreads = 128;

struct PlainWeight {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;  // null: every zero point is `symmetric_zero`
  DType scale_dtype;
  int code_bits;
  int symmetric_zero;
  int64_t n;
  int64_t row_bytes;
  int64_t group_size;
};

__device__ float Load(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kFp32) return static_cast<const float*>(data)[at];
  const uint16_t bits = static_cast<const uint16_t*>(data)[at];
  return dtype == DType::kFp16 ? HalfToFloat(bits) : Bf16ToFloat(bits);
}

__device__ void Store(void* data, DType dtype, int64_t at, float value) {
  if (dtype == DType::kFp32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<uint16_t*>(data)[at] =
        dtype == DType::kFp16 ? FloatToHalf(value) : FloatToBf16(value);
  }
}

// (q - z) * s. Exact in fp32 unless the scale is FP32.
__device__ float Weight(const PlainWeight& w, int64_t k, int64_t n) {
  const int64_t bit = n * w.code_bits;
  const int code = w.codes[k * w.row_bytes + bit / 8] >> (bit % 8) & ((1 << w.code_bits) - 1);
  const int64_t at = k / w.group_size * w.n + n;
  const int zero = w.zeros == nullptr ? w.symmetric_zero : w.zeros[at];
  return (code - zero) * Load(w.scales, w.scale_dtype, at);
}

__global__ __launch_bounds__(kThreads) void PlainDequantize(PlainWeight w, void* out, DType dtype,
                                                            int64_t rows, int64_t cols,
                                                            int64_t row_begin, int64_t col_begin) {
  const int64_t col = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (col >= cols) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    Store(out, dtype, row * cols + col, Weight(w, row_begin + row, col_begin + col));
  }
}

__global__ __launch_bounds__(kThreads) void PlainMatmul(PlainWeight w, const void* x, DType x_dtype,
                                                        void* y, DType y_dtype, const float* bias,
                                                        int64_t m, int64_t k) {
  const int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n >= w.n) return;
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    float sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      const float exact = Weight(w, i, n);
      const float weight = x_dtype == DType::kBf16 ? Bf16ToFloat(FloatToBf16(exact))
                                                   : HalfToFloat(FloatToHalf(exact));
      sum += Load(x, x_dtype, row * k + i) * weight;
    }
    Store(y, y_dtype, row * w.n + n, bias == nullptr ? sum : sum + bias[n]);
  }
}

PlainWeight View(const DeviceWeight& weight) {
  const QuantScheme& s = weight.shape.scheme;
  return {.codes = weight.codes(),
          .scales = weight.scales(),
          .zeros = s.zero_kind == ZeroKind::kInteger ? weight.zeros() : nullptr,
          .scale_dtype = s.scale_dtype,
          .code_bits = CodeBits(s.bits),
          .symmetric_zero = 1 << (s.bits - 1),
          .n = weight.shape.n,
          .row_bytes = CeilDiv(weight.shape.n * CodeBits(s.bits), 8),
          .group_size = s.group_size};
}

dim3 Grid(int64_t cols, int64_t rows) {
  constexpr int64_t kMaxY = 65535;
  return {static_cast<unsigned>(CeilDiv(cols, kThreads)),
          static_cast<unsigned>(rows < kMaxY ? rows : kMaxY)};
}

absl::Status RunDequantize(const DequantizeArgs& args, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(args.weight->device->info().index));
  const LaunchConfig config{
      .grid = Grid(args.out.cols, args.out.rows), .block = kThreads, .stream = stream};
  return Launch<PlainDequantize>("sm80/plain_dequantize", config, View(*args.weight), args.out.data,
                                 args.out.dtype, args.out.rows, args.out.cols, args.row_begin,
                                 args.col_begin);
}

absl::Status RunMatmul(const MatmulArgs& args, StreamView stream) {
  AWQD_RETURN_IF_ERROR(UseDevice(args.weight->device->info().index));
  const LaunchConfig config{
      .grid = Grid(args.y.cols, args.y.rows), .block = kThreads, .stream = stream};
  return Launch<PlainMatmul>("sm80/plain_matmul", config, View(*args.weight), args.x.data,
                             args.x.dtype, args.y.data, args.y.dtype, args.bias, args.x.rows,
                             args.x.cols);
}

KernelRow AnyScheme(absl::string_view name, Op op) {
  KernelRow row;
  row.name = name;
  row.op = op;
  row.device = DeviceKind::kCuda;
  row.bits_mask = 0x1fe;
  row.scales = kFloatingMask;
  row.layout = &kPlainLayout;
  row.min_arch = 80;
  return row;
}

}  // namespace

const KernelRow& PlainDequantizeRow() {
  static const KernelRow row = [] {
    KernelRow out = AnyScheme("sm80/plain_dequantize", Op::kDequantize);
    out.dequantize = RunDequantize;
    return out;
  }();
  return row;
}

const KernelRow& PlainMatmulRow() {
  static const KernelRow row = [] {
    KernelRow out = AnyScheme("sm80/plain_matmul", Op::kMatmul);
    out.matmul = RunMatmul;
    return out;
  }();
  return row;
}

}  // namespace awqd::cuda
