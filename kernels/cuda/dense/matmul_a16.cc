// dense/matmul_a16: decodes the weight slab by slab and multiplies each with cuBLASLt.
//
// Computes: y = x @ W (+ bias), FP32 accumulation, one rounding to y's dtype.
// Weight layout: any; the plan's dequantize row reads it. Weights: any that this row decodes.
// Work split: slabs of columns (slabs.h), in stream order: decode slab, multiply, next slab into
//   the same memory. With many tokens a slab stays in L2 between its two kernels.
// W's dtype follows x. FP32 x is multiplied in plain FP32, and sums that overflow are computed once
//   more in FP64: it is for checking, not for speed.
// Bias, and outputs that cuBLASLt does not write (BF16 from FP16, say), go through FP32 sums and
//   one kernel, so that there is one rounding there too; cuBLASLt's bias epilogue would need the
//   bias in the output's type.
// Limits: needs cuBLASLt on the machine; DeviceInfo::dense_unavailable says why not.
#include "kernels/cuda/dense/matmul_a16.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/dense/gemm.h"
#include "kernels/cuda/dense/overflow.h"
#include "kernels/cuda/dense/slabs.h"

namespace awqd {
namespace dense {
namespace {

struct Context {
  const MatmulArgs& args;
  Workspace sections;
  StreamView stream;

  char* base() const { return static_cast<char*>(args.workspace); }
  float* scratch() const { return reinterpret_cast<float*>(base() + sections.scratch_offset()); }
};

// A run of columns [begin, begin + count) of the weight, decoded.
struct Slab {
  int64_t begin = 0;
  int64_t count = 0;
  const void* data = nullptr;
};

absl::Status Decode(const Context& c, DType dtype, const Slab& slab, void* out) {
  const DeviceWeight& weight = *c.args.weight;
  const KernelRow& row = *weight.plan.dequantize;
  if ((row.outputs & MaskOf(dtype)) == 0) {
    return absl::UnimplementedError(
        absl::StrCat("dense path: ", row.name, " does not decode to ", Name(dtype)));
  }
  DequantizeArgs args;
  args.weight = &weight;
  args.out = {out, dtype, weight.shape.k, slab.count};
  args.col_begin = slab.begin;
  return row.dequantize(args, c.stream);
}

// Fills slab->data with the weights in x's dtype.
absl::Status DecodeFor(const Context& c, Slab* slab) {
  slab->data = c.base();
  return Decode(c, c.args.x.dtype, *slab, c.base());
}

GemmArgs Product(const Context& c, const Slab& slab, int64_t row, int64_t rows) {
  const MatmulArgs& a = c.args;
  GemmArgs out;
  out.m = rows;
  out.n = slab.count;
  out.k = a.x.cols;
  out.x = static_cast<const char*>(a.x.data) + row * a.x.cols * SizeOf(a.x.dtype);
  out.w = slab.data;
  out.in = a.x.dtype;
  out.workspace = c.base() + c.sections.blas_offset();
  out.workspace_bytes = c.sections.blas_bytes;
  return out;
}

// The product as `gemm` says. FP32 results are right wherever the exact sum is finite.
absl::Status Multiply(const GemmArgs& gemm, StreamView stream) {
  AWQD_RETURN_IF_ERROR(Gemm(gemm, stream));
  if (gemm.in != DType::kFp32) return absl::OkStatus();
  return RepairOverflows({.x = static_cast<const float*>(gemm.x),
                          .w = static_cast<const float*>(gemm.w),
                          .y = static_cast<float*>(gemm.y),
                          .ld_y = gemm.ld_y,
                          .m = gemm.m,
                          .n = gemm.n,
                          .k = gemm.k},
                         stream);
}

char* OutputAt(const MatmulArgs& a, int64_t row, int64_t col) {
  return static_cast<char*>(a.y.data) + (row * a.y.cols + col) * SizeOf(a.y.dtype);
}

// cuBLASLt writes y itself; a bias can only follow in place when y is FP32.
absl::Status MultiplyDirect(const Context& c, const Slab& slab) {
  const MatmulArgs& a = c.args;
  GemmArgs gemm = Product(c, slab, 0, a.x.rows);
  gemm.y = OutputAt(a, 0, slab.begin);
  gemm.ld_y = a.y.cols;
  gemm.out = a.y.dtype;
  AWQD_RETURN_IF_ERROR(Multiply(gemm, c.stream));
  if (a.bias == nullptr) return absl::OkStatus();
  return cuda::Finish({.sums = static_cast<const float*>(gemm.y),
                       .ld_sums = a.y.cols,
                       .bias = a.bias + slab.begin,
                       .y = gemm.y,
                       .ld_y = a.y.cols,
                       .y_dtype = a.y.dtype,
                       .rows = a.x.rows,
                       .cols = slab.count},
                      *a.weight->device, c.stream);
}

absl::Status MultiplyThroughScratch(const Context& c, const Slab& slab, int64_t rows_per_pass) {
  const MatmulArgs& a = c.args;
  for (int64_t row = 0; row < a.x.rows; row += rows_per_pass) {
    const int64_t rows = std::min(rows_per_pass, a.x.rows - row);
    GemmArgs gemm = Product(c, slab, row, rows);
    gemm.y = c.scratch();
    gemm.ld_y = slab.count;
    gemm.out = DType::kFp32;
    AWQD_RETURN_IF_ERROR(Multiply(gemm, c.stream));
    AWQD_RETURN_IF_ERROR(cuda::Finish({.sums = c.scratch(),
                                       .ld_sums = slab.count,
                                       .bias = a.bias != nullptr ? a.bias + slab.begin : nullptr,
                                       .y = OutputAt(a, row, slab.begin),
                                       .ld_y = a.y.cols,
                                       .y_dtype = a.y.dtype,
                                       .rows = rows,
                                       .cols = slab.count},
                                      *a.weight->device, c.stream));
  }
  return absl::OkStatus();
}

absl::Status Matmul(const MatmulArgs& args, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  return MatmulInSlabs(args, SlabColumns(args.x.rows, args.weight->shape, args.x.dtype, device),
                       stream);
}

std::string Refuses(const WeightShape&, const DeviceInfo& device) {
  return device.dense_unavailable;
}

int64_t WorkspaceBytes(const WeightShape& shape, const DeviceInfo& device, int64_t) {
  return PlanWorkspace(shape, device).total();
}

}  // namespace

KernelRow MatmulRow() {
  KernelRow row;
  row.name = "dense/matmul_a16";
  row.op = Op::kMatmul;
  row.path = Path::kDequantize;
  row.device = DeviceKind::kCuda;
  row.claims = kEverything;
  row.min_arch = 80;
  row.refuses = Refuses;
  row.workspace_bytes = WorkspaceBytes;
  row.matmul = Matmul;
  return row;
}

absl::Status MatmulInSlabs(const MatmulArgs& args, int64_t columns, StreamView stream) {
  const DeviceInfo& device = args.weight->device->info();
  const WeightShape& shape = args.weight->shape;
  AWQD_RETURN_IF_ERROR(cuda::UseDevice(device.index));
  const Context context{args, PlanWorkspace(shape, device), stream};
  const bool direct = GemmSupports(args.x.dtype, args.y.dtype) &&
                      (args.bias == nullptr || args.y.dtype == DType::kFp32);
  const int64_t rows_per_pass = ScratchRows(args.x.rows, columns);
  for (int64_t begin = 0; begin < shape.n; begin += columns) {
    Slab slab{begin, std::min(columns, shape.n - begin), nullptr};
    AWQD_RETURN_IF_ERROR(DecodeFor(context, &slab));
    AWQD_RETURN_IF_ERROR(direct ? MultiplyDirect(context, slab)
                                : MultiplyThroughScratch(context, slab, rows_per_pass));
  }
  return absl::OkStatus();
}

}  // namespace dense

const KernelRow kDenseMatmulA16 = dense::MatmulRow();

}  // namespace awqd
