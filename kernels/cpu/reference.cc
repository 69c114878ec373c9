// cpu/reference. Computes the definition, in double.
//
// Weight layout: any; it is unpacked on every call. Work split: none. Limits: none but patience.
#include "kernels/cpu/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/exact.h"
#include "kernels/layouts/layout.h"

namespace awqd {
namespace {

// Without order, factor and bias, which rows do not know of.
HostWeight HostCopy(const DeviceWeight& weight) {
  return Unpack(*weight.layout, weight.shape, weight.sections,
                static_cast<const uint8_t*>(weight.storage.data()));
}

absl::Status DequantizeRow(const DequantizeArgs& args, StreamView) {
  const HostWeight weight = HostCopy(*args.weight);
  const MatrixView& out = args.out;
  for (int64_t r = 0; r < out.rows; ++r) {
    for (int64_t c = 0; c < out.cols; ++c) {
      StoreElement(out.data, out.dtype, r * out.cols + c,
                   WeightValue(weight, args.row_begin + r, args.col_begin + c));
    }
  }
  return absl::OkStatus();
}

absl::Status MatmulRow(const MatmulArgs& args, StreamView) {
  const std::vector<double> y =
      ReferenceProduct(HostCopy(*args.weight), {.x = args.x, .bias = args.bias});
  for (size_t i = 0; i < y.size(); ++i) StoreElement(args.y.data, args.y.dtype, i, y[i]);
  return absl::OkStatus();
}

absl::Status IntegerMatmulRow(const MatmulArgs& args, StreamView) {
  const std::vector<int64_t> y = ReferenceIntegers(
      HostCopy(*args.weight), static_cast<const int8_t*>(args.x.data), args.x.rows);
  std::copy(y.begin(), y.end(), static_cast<int32_t*>(args.y.data));
  return absl::OkStatus();
}

absl::Status QuantizedMatmulRow(const MatmulArgs& args, StreamView) {
  const std::vector<double> y =
      ReferenceProduct(HostCopy(*args.weight), {.q = static_cast<const int8_t*>(args.x.data),
                                                .scale = args.x_scale,
                                                .tokens = args.x.rows,
                                                .bias = args.bias});
  for (size_t i = 0; i < y.size(); ++i) StoreElement(args.y.data, args.y.dtype, i, y[i]);
  return absl::OkStatus();
}

// x * factor, multiplied by the transform: the definition, element by element.
std::vector<double> TransformedRows(const HostWeight& weight, const ConstMatrixView& x) {
  std::vector<double> out(x.rows * x.cols);
  for (int64_t i = 0; i < x.rows * x.cols; ++i) {
    const double factor = weight.factor.empty() ? 1 : weight.factor[i % x.cols];
    out[i] = factor * LoadElement(x.data, x.dtype, i);
  }
  const auto [size, scale] = weight.hadamard;
  if (size == 0) return out;
  std::vector<double> block(size);
  for (auto begin = out.begin(); begin != out.end(); begin += size) {
    std::copy(begin, begin + size, block.begin());
    for (int64_t j = 0; j < size; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < size; ++i)
        sum += std::popcount(uint64_t(i & j)) % 2 == 0 ? block[i] : -block[i];
      begin[j] = sum * scale;
    }
  }
  return out;
}

// W of scheme.h without a rounding.
double ExactWeight(const HostWeight& weight, int64_t row, int64_t col) {
  const QuantizationScheme& d = weight.scheme;
  const int64_t group = row / weight.group_rows();
  const double code = weight.Code(row, col), scale = weight.Scale(group, col);
  const double zero = d.real_zeros() ? weight.RealZero(group, col) : weight.Zero(group, col);
  const double value =
      d.zero_kind == ZeroKind::kRealAfter ? code * scale - zero : (code - zero) * scale;
  return value * weight.Outer(col);
}

}  // namespace

const KernelRow kCpuReferenceDequantize = {.name = "cpu/reference",
                                           .op = Op::kDequantize,
                                           .claims = kEverything,
                                           .priority = -1,
                                           .dequantize = DequantizeRow};
const KernelRow kCpuReferenceMatmul = {.name = "cpu/reference",
                                       .op = Op::kMatmul,
                                       .claims = kEverything,
                                       .batch_invariant = true,
                                       .priority = -1,
                                       .matmul = MatmulRow};
const KernelRow kCpuReferenceIntegerMatmul = {.name = "cpu/reference",
                                              .op = Op::kIntegerMatmul,
                                              .claims = kIntegers,
                                              .inputs = MaskOf(DType::kInt8),
                                              .outputs = MaskOf(DType::kInt32),
                                              .batch_invariant = true,
                                              .priority = -1,
                                              .matmul = IntegerMatmulRow};

const KernelRow kCpuReferenceQuantizedMatmul = {.name = "cpu/reference",
                                                .op = Op::kQuantizedActivations,
                                                .claims = kIntegerCodes,
                                                .input_form = InputForm::kQuantized,
                                                .inputs = kFloatingMask | MaskOf(DType::kInt8),
                                                .batch_invariant = true,
                                                .priority = -1,
                                                .matmul = QuantizedMatmulRow};

double Activate(ActivationFunction activation, double value) {
  switch (activation) {
    case ActivationFunction::kNone:
      return value;
    case ActivationFunction::kRelu:
      return value < 0 ? 0 : value;
    case ActivationFunction::kGelu:
      return 0.5 * value * std::erfc(-value / std::sqrt(2.0));
    case ActivationFunction::kSilu:
      return value / (1 + std::exp(-value));
    case ActivationFunction::kGeluTanh:
      return 0.5 * value *
             (1 + std::tanh(std::sqrt(2 / M_PI) * (value + 0.044715 * std::pow(value, 3))));
    default:
      return value;
  }
}

std::vector<double> ReferenceProduct(const HostWeight& weight, const ReferenceInput& input) {
  const ConstMatrixView& x = input.x;
  std::vector<double> y(x.rows * weight.n), row(weight.n);
  const std::vector<double> transformed = TransformedRows(weight, x);
  for (int64_t i = 0; i < weight.k; ++i) {
    for (int64_t n = 0; n < weight.n; ++n) row[n] = WeightValue(weight, i, n);
    const int64_t k = weight.order.empty() ? i : weight.order[i];
    for (int64_t m = 0; m < x.rows; ++m) {
      const double value = transformed[m * weight.k + k];
      double* out = y.data() + m * weight.n;
      for (int64_t n = 0; n < weight.n; ++n) out[n] += value * row[n];
    }
  }
  for (int64_t i = 0; i < x.rows * weight.n; ++i) {
    if (input.bias != nullptr) y[i] += input.bias[i % weight.n];
    y[i] = Activate(input.activation, y[i]);
  }
  return y;
}

std::vector<double> ReferenceProduct(const HostWeight& weight, const ReferenceQuantized& input) {
  std::vector<double> y(input.tokens * weight.n), row(weight.n);
  for (int64_t i = 0; i < weight.k; ++i) {
    for (int64_t n = 0; n < weight.n; ++n) row[n] = ExactWeight(weight, i, n);
    const int64_t k = weight.order.empty() ? i : weight.order[i];
    for (int64_t m = 0; m < input.tokens; ++m) {
      const double q = input.q[m * weight.k + k];
      for (int64_t n = 0; n < weight.n; ++n) y[m * weight.n + n] += q * row[n];
    }
  }
  for (int64_t i = 0; i < input.tokens * weight.n; ++i) {
    y[i] *= input.scale[i / weight.n];
    if (input.bias != nullptr) y[i] += input.bias[i % weight.n];
    y[i] = Activate(input.activation, y[i]);
  }
  return y;
}

std::vector<int64_t> ReferenceIntegers(const HostWeight& weight, const int8_t* x, int64_t tokens) {
  std::vector<int64_t> y(tokens * weight.n);
  for (int64_t i = 0; i < weight.k; ++i) {
    const int64_t k = weight.order.empty() ? i : weight.order[i];
    for (int64_t n = 0; n < weight.n; ++n) {
      const int64_t value = weight.Code(i, n) - weight.Zero(i / weight.group_rows(), n);
      for (int64_t m = 0; m < tokens; ++m) y[m * weight.n + n] += x[m * weight.k + k] * value;
    }
  }
  return y;
}

}  // namespace awqd
