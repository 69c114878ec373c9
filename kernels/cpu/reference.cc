// cpu/reference. Computes the definition, in double.
//
// Weight layout: any; it is unpacked on every call. Work split: none. Limits: none but patience.
#include "kernels/cpu/reference.h"

#include "kernels/base/half.h"
#include "kernels/cpu/elements.h"

namespace awqd {
namespace {

CanonicalWeight Unpack(const DeviceWeight& weight) {
  CanonicalWeight out;
  out.k = weight.shape.k;
  out.n = weight.shape.n;
  out.scheme = weight.shape.scheme;
  const int64_t cells = out.groups() * out.n;
  out.codes.resize(out.k * out.row_bytes());
  out.scales.resize(cells * SizeOf(out.scheme.scale_dtype));
  if (out.scheme.zero_kind == ZeroKind::kInteger) out.zeros.resize(cells);
  weight.layout->unpack(weight.codes(), &out);
  return out;
}

absl::Status DequantizeRow(const DequantizeArgs& args, StreamView) {
  const CanonicalWeight weight = Unpack(*args.weight);
  const MatrixView& out = args.out;
  for (int64_t r = 0; r < out.rows; ++r) {
    for (int64_t c = 0; c < out.cols; ++c) {
      StoreElement(out.data, out.dtype, r * out.cols + c,
                   ExactWeight(weight, args.row_begin + r, args.col_begin + c));
    }
  }
  return absl::OkStatus();
}

absl::Status MatmulRow(const MatmulArgs& args, StreamView) {
  const std::vector<double> y = ReferenceProduct(Unpack(*args.weight), args.x, args.bias);
  for (size_t i = 0; i < y.size(); ++i) StoreElement(args.y.data, args.y.dtype, i, y[i]);
  return absl::OkStatus();
}

KernelRow Row(Op op) {
  KernelRow row;
  row.name = "cpu/reference";
  row.op = op;
  row.device = DeviceKind::kCpu;
  row.bits_mask = 0b111111110;
  row.scales = kFloatingMask;
  row.batch_invariant = op == Op::kMatmul;
  row.priority = -1;
  if (op == Op::kDequantize) row.dequantize = DequantizeRow;
  if (op == Op::kMatmul) row.matmul = MatmulRow;
  return row;
}

}  // namespace

const KernelRow kCpuReferenceDequantize = Row(Op::kDequantize);
const KernelRow kCpuReferenceMatmul = Row(Op::kMatmul);

double ExactWeight(const CanonicalWeight& weight, int64_t row, int64_t col) {
  const int64_t group = row / weight.scheme.group_size;
  return static_cast<double>(weight.Code(row, col) - weight.Zero(group, col)) *
         static_cast<double>(weight.Scale(group, col));
}

double ProductWeight(const CanonicalWeight& weight, int64_t row, int64_t col) {
  const double exact = ExactWeight(weight, row, col);
  if (weight.scheme.scale_dtype != DType::kFp16) return exact;
  return HalfToFloat(FloatToHalf(RoundToOdd(exact)));
}

std::vector<double> ReferenceProduct(const CanonicalWeight& weight, const ConstMatrixView& x,
                                     const float* bias) {
  std::vector<double> y(x.rows * weight.n);
  std::vector<double> row(weight.n);
  for (int64_t k = 0; k < weight.k; ++k) {
    for (int64_t n = 0; n < weight.n; ++n) row[n] = ProductWeight(weight, k, n);
    for (int64_t m = 0; m < x.rows; ++m) {
      const double factor = LoadElement(x.data, x.dtype, m * weight.k + k);
      double* out = y.data() + m * weight.n;
      for (int64_t n = 0; n < weight.n; ++n) out[n] += factor * row[n];
    }
  }
  if (bias == nullptr) return y;
  for (int64_t m = 0; m < x.rows; ++m) {
    for (int64_t n = 0; n < weight.n; ++n) y[m * weight.n + n] += bias[n];
  }
  return y;
}

}  // namespace awqd
