// Rows sm80/plain_matmul, sm80/plain_qmatmul_a8, sm80/plain_qmatmul_a8_scaled and
// sm80/plain_dequantize: the operations for any weight, in the layout "plain". They serve weights
// that layout mma16 refuses, for example group sizes that are no multiple of 16. Correct, not fast.
// Limits: none.
//
// One thread per output column and row, plain arithmetic with the exact weight: in FP32, for INT8
// activations in INT32, for quantised ones in 64-bit integers over each group. An FP32 sum that
// overflows is computed once more in FP64.
#include "kernels/base/float8.h"
#include "kernels/base/half.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/launch.h"
#include "kernels/cuda/sm80/rows.h"
#include "kernels/layouts/layout.h"

namespace awqd::cuda {
namespace {

// ---- A weight as kernels see it -----------------------------------------------------------------

constexpr int kThreads = 128;

struct Weight {
  const uint8_t* codes;
  const uint8_t* scales;  // null: 1
  const uint8_t* zeros;   // null: every zero is `zero`
  const float* table;
  const float* outer;  // null: 1
  CodeKind code;
  ZeroKind zero_kind;
  DType zero_dtype;
  DType scale_dtype;
  int code_bits;
  int zero;
  int64_t n;
  int64_t row_bytes;
  int64_t group_rows;
  int64_t block_cols;
  int64_t column_blocks;
};

__device__ float Load(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kFp32:
      return static_cast<const float*>(data)[at];
    case DType::kFp16:
      return HalfToFloat(static_cast<const uint16_t*>(data)[at]);
    case DType::kBf16:
      return Bf16ToFloat(static_cast<const uint16_t*>(data)[at]);
    case DType::kE4m3:
      return E4m3ToFloat(static_cast<const uint8_t*>(data)[at]);
    case DType::kE8m0:
      return E8m0ToFloat(static_cast<const uint8_t*>(data)[at]);
    default:
      return static_cast<const int8_t*>(data)[at];
  }
}

__device__ void Store(void* data, DType dtype, int64_t at, float value) {
  if (dtype == DType::kFp32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<uint16_t*>(data)[at] =
        dtype == DType::kFp16 ? FloatToHalf(value) : FloatToBf16(value);
  }
}

__device__ float CodeAt(const Weight& w, int64_t k, int64_t n) {
  const int64_t bit = n * w.code_bits;
  const int code = w.codes[k * w.row_bytes + bit / 8] >> (bit % 8) & ((1 << w.code_bits) - 1);
  switch (w.code) {
    case CodeKind::kE2m1:
      return E2m1ToFloat(static_cast<uint8_t>(code));
    case CodeKind::kE4m3:
      return E4m3ToFloat(static_cast<uint8_t>(code));
    case CodeKind::kTable:
      return w.table[code];
    default:
      return code;
  }
}

struct Scale {
  float scale, zero;
};
__device__ Scale ScaleOf(const Weight& w, int64_t group, int64_t n) {
  const int64_t at = group * w.column_blocks + n / w.block_cols;
  return {w.scales == nullptr ? 1 : Load(w.scales, w.scale_dtype, at),
          w.zeros == nullptr                 ? w.zero
          : w.zero_kind == ZeroKind::kStored ? w.zeros[at]
                                             : Load(w.zeros, w.zero_dtype, at)};
}

// The formula of kernels/exact.h, rounded at every step: no operation is fused with another.
__device__ float Element(const Weight& w, int64_t k, int64_t n) {
  const float code = CodeAt(w, k, n);
  const auto [scale, zero] = ScaleOf(w, k / w.group_rows, n);
  const float value = w.zero_kind == ZeroKind::kRealAfter ? __fsub_rn(__fmul_rn(code, scale), zero)
                                                          : __fmul_rn(__fsub_rn(code, zero), scale);
  return w.outer == nullptr ? value : __fmul_rn(value, w.outer[n]);
}

Weight View(const DeviceWeight& weight) {
  const WeightShape& shape = weight.shape;
  const QuantizationScheme& d = shape.scheme;
  return {.codes = weight.codes(),
          .scales = weight.scales(),
          .zeros = weight.zeros(),
          .table = weight.table(),
          .outer = weight.outer(),
          .code = d.code,
          .zero_kind = d.zero_kind,
          .zero_dtype = d.zero_dtype,
          .scale_dtype = d.scale_dtype.value_or(DType::kFp16),
          .code_bits = CodeBits(d.bits),
          .zero = d.zero,
          .n = shape.n,
          .row_bytes = CeilDiv(shape.n * CodeBits(d.bits), 8),
          .group_rows = shape.group_rows(),
          .block_cols = shape.block_cols(),
          .column_blocks = shape.column_blocks()};
}

// ---- Kernels ------------------------------------------------------------------------------------

__global__ __launch_bounds__(kThreads) void MatmulKernel(Weight w, const void* x, DType x_dtype,
                                                         void* y, DType y_dtype, const float* bias,
                                                         int64_t m, int64_t k) {
  const int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n >= w.n) return;
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    float sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      sum += Load(x, x_dtype, row * k + i) * Element(w, i, n);
    }
    if (!isfinite(sum)) {
      double exact = 0;
      for (int64_t i = 0; i < k; ++i) {
        exact += double{Load(x, x_dtype, row * k + i)} * Element(w, i, n);
      }
      sum = static_cast<float>(exact);
    }
    Store(y, y_dtype, row * w.n + n, bias == nullptr ? sum : sum + bias[n]);
  }
}

__global__ __launch_bounds__(kThreads) void IntegerKernel(Weight w, const int8_t* x, int32_t* y,
                                                          int64_t m, int64_t k) {
  const int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n >= w.n) return;
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      sum += x[row * k + i] * static_cast<int32_t>(Element(w, i, n));
    }
    y[row * w.n + n] = sum;
  }
}

// The exact sums of q * code and of q, for one column over [begin, end) of K, which one scale
// serves.
struct GroupSums {
  int64_t codes = 0;
  int64_t tokens = 0;
};
__device__ GroupSums SumGroup(const Weight& w, const int8_t* x, int64_t begin, int64_t end,
                              int64_t n) {
  GroupSums out;
  for (int64_t i = begin; i < end; ++i) {
    out.codes += x[i] * static_cast<int32_t>(CodeAt(w, i, n));
    out.tokens += x[i];
  }
  return out;
}

// In double, because a zero may cancel nearly all of a sum.
__device__ double Scaled(const Weight& w, const GroupSums& sums, int64_t group, int64_t n) {
  const Scale s = ScaleOf(w, group, n);
  return w.zero_kind == ZeroKind::kRealAfter
             ? sums.codes * double{s.scale} - double{s.zero} * sums.tokens
             : (sums.codes - double{s.zero} * sums.tokens) * double{s.scale};
}

__global__ __launch_bounds__(kThreads) void QuantizedKernel(Weight w, const int8_t* x,
                                                            const float* x_scale, void* y,
                                                            DType y_dtype, const float* bias,
                                                            int64_t m, int64_t k) {
  const int64_t n = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (n >= w.n) return;
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    double sum = 0;
    for (int64_t begin = 0; begin < k; begin += w.group_rows) {
      const int64_t end = min(begin + w.group_rows, k);
      sum += Scaled(w, SumGroup(w, x + row * k, begin, end, n), begin / w.group_rows, n);
    }
    if (w.outer != nullptr) sum *= w.outer[n];
    const float value = static_cast<float>(sum) * x_scale[row];
    Store(y, y_dtype, row * w.n + n, bias == nullptr ? value : value + bias[n]);
  }
}

__global__ __launch_bounds__(kThreads) void DequantizeKernel(Weight w, void* out, DType dtype,
                                                             int64_t rows, int64_t cols,
                                                             int64_t row_begin, int64_t col_begin) {
  const int64_t col = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (col >= cols) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    Store(out, dtype, row * cols + col, Element(w, row_begin + row, col_begin + col));
  }
}

// ---- Rows ---------------------------------------------------------------------------------------

// Launches kKernel(weight, args...) with a thread for each element of `out`.
template <auto kKernel, typename... Args>
absl::Status LaunchOver(const MatrixView& out, absl::string_view name, const DeviceWeight& weight,
                        StreamView stream, const Args&... args) {
  AWQD_RETURN_IF_ERROR(UseDevice(weight.device->info().index));
  const LaunchConfig config{
      .grid = GridOfRows(out.cols, out.rows, kThreads), .block = kThreads, .stream = stream};
  return Launch<kKernel>(name, config, View(weight), args...);
}

absl::Status RunMatmul(const MatmulArgs& a, StreamView stream) {
  return LaunchOver<MatmulKernel>(a.y, "sm80/plain_matmul", *a.weight, stream, a.x.data, a.x.dtype,
                                  a.y.data, a.y.dtype, a.bias, a.x.rows, a.x.cols);
}

absl::Status RunIntegers(const MatmulArgs& a, StreamView stream) {
  return LaunchOver<IntegerKernel>(a.y, "sm80/plain_qmatmul_a8", *a.weight, stream,
                                   static_cast<const int8_t*>(a.x.data),
                                   static_cast<int32_t*>(a.y.data), a.x.rows, a.x.cols);
}

absl::Status RunQuantized(const MatmulArgs& a, StreamView stream) {
  return LaunchOver<QuantizedKernel>(a.y, "sm80/plain_qmatmul_a8_scaled", *a.weight, stream,
                                     static_cast<const int8_t*>(a.x.data), a.x_scale, a.y.data,
                                     a.y.dtype, a.bias, a.x.rows, a.x.cols);
}

absl::Status RunDequantize(const DequantizeArgs& a, StreamView stream) {
  return LaunchOver<DequantizeKernel>(a.out, "sm80/plain_dequantize", *a.weight, stream, a.out.data,
                                      a.out.dtype, a.out.rows, a.out.cols, a.row_begin,
                                      a.col_begin);
}

}  // namespace

const KernelRow& PlainMatmulRow() {
  static const KernelRow row = {.name = "sm80/plain_matmul",
                                .op = Op::kMatmul,
                                .device = DeviceKind::kCuda,
                                .claims = kElementCodes,
                                .layout = &kPlainLayout,
                                .min_arch = 75,
                                .batch_invariant = true,
                                .matmul = RunMatmul};
  return row;
}

const KernelRow& PlainQMatmulA8Row() {
  static const KernelRow row = {.name = "sm80/plain_qmatmul_a8",
                                .op = Op::kIntegerMatmul,
                                .device = DeviceKind::kCuda,
                                .claims = kIntegers,
                                .inputs = MaskOf(DType::kInt8),
                                .outputs = MaskOf(DType::kInt32),
                                .layout = &kPlainLayout,
                                .min_arch = 75,
                                .batch_invariant = true,
                                .matmul = RunIntegers};
  return row;
}

const KernelRow& PlainQMatmulA8ScaledRow() {
  static const KernelRow row = {.name = "sm80/plain_qmatmul_a8_scaled",
                                .op = Op::kQuantizedActivations,
                                .device = DeviceKind::kCuda,
                                .claims = kIntegerCodes,
                                .input_form = InputForm::kQuantized,
                                .inputs = kFloatingMask | MaskOf(DType::kInt8),
                                .layout = &kPlainLayout,
                                .min_arch = 75,
                                .batch_invariant = true,
                                .matmul = RunQuantized};
  return row;
}

const KernelRow& PlainDequantizeRow() {
  static const KernelRow row = {.name = "sm80/plain_dequantize",
                                .op = Op::kDequantize,
                                .device = DeviceKind::kCuda,
                                .claims = kElementCodes,
                                .layout = &kPlainLayout,
                                .min_arch = 75,
                                .dequantize = RunDequantize};
  return row;
}

}  // namespace awqd::cuda
