// dense/matmul_a16: decodes the weight slab by slab and multiplies each with cuBLASLt.
// dense/matmul_fp16: the same for GPUs before compute capability 8.0, which have no BF16 arithmetic
// that cuBLASLt could use. BF16 activations go through the fused rows there, whatever their tokens.
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
#include "kernels/cuda/dense/matmul.h"

#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/cuda/common/steps.h"
#include "kernels/cuda/core/error.h"
#include "kernels/cuda/dense/gemm.h"

namespace awqd::dense {
namespace {

// ---- Slabs --------------------------------------------------------------------------------------

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kAlign = 256;
// For many tokens a slab may fill two thirds of the L2, and is 2^n columns wide, 2048 at most:
// cuBLASLt's tiles then come out even. H100, 2026-11-21, M = 4096: 4096 x 28672 1373 us with 2048
// columns, 1561 with 4096, 1560 with 1536; 14336 x 4096 711 with 1024, 868 with 2048, 958 with
// 1408.
constexpr int64_t kMinTargetBytes = 4 * kMiB;
constexpr int64_t kMaxTargetBytes = 32 * kMiB;
constexpr int64_t kMostL2Columns = 2048;
// The most bytes of a slab. H100, 2026-11-21, [256, 14336] x [14336, 4096]: 112 us in one slab of
// 112 MiB, 126 in two, 137 in four.
constexpr int64_t kMaxSlabBytes = 128 * kMiB;
// Below kFewTokens a product ends so soon that the starts and tails of slabs cost more than the
// trip of the decoded weight through memory: as few slabs as there is room for. From kManyTokens
// on, slabs stay in L2. Between the two, kMiddleColumns fill the GPU evenly: 4096 x 28672, 512
// tokens, 271 us against 295 in two slabs and 353 in L2.
constexpr int64_t kFewTokens = 512;
constexpr int64_t kManyTokens = 2048;
constexpr int64_t kMiddleColumns = 4096;
constexpr int64_t kScratchBytes = 16 * kMiB;
// Slabs begin at cuBLASLt's output tiles.
constexpr int64_t kTile = 128;
// NVIDIA advises 32 MiB for Hopper; 8 suffice before it.
constexpr int64_t kBlasBytesHopper = 32 * kMiB;
constexpr int64_t kBlasBytesBefore = 8 * kMiB;

// Columns whose decoded weights take at most `bytes`: a multiple of the tile where one fits, else
// of 8, and at least 8.
int64_t ColumnsIn(int64_t bytes, int64_t bytes_per_column) {
  const int64_t columns = bytes / bytes_per_column;
  const int64_t step = columns >= kTile ? kTile : 8;
  return std::max<int64_t>(8, columns / step * step);
}

int64_t WidestSlab(const WeightShape& shape, int64_t bytes_per_column) {
  return std::min(shape.n, ColumnsIn(kMaxSlabBytes, bytes_per_column));
}

// Columns that stay in L2 once decoded; all of them when the whole weight does.
int64_t L2Columns(const WeightShape& shape, int64_t bytes_per_column, const DeviceInfo& device) {
  const int64_t target = std::clamp(device.l2_bytes * 2 / 3, kMinTargetBytes, kMaxTargetBytes);
  if (shape.n * bytes_per_column <= target) return shape.n;
  const int64_t columns = std::clamp<int64_t>(target / bytes_per_column, 8, kMostL2Columns);
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(columns)));
}

// ---- Products -----------------------------------------------------------------------------------

struct Context {
  const MatmulArgs& args;
  Workspace sections;
  StreamView stream;

  char* base() const { return static_cast<char*>(args.workspace); }
  float* scratch() const { return reinterpret_cast<float*>(base() + sections.scratch_offset()); }
};

// Columns [begin, begin + count) of the weight.
struct Slab {
  int64_t begin = 0;
  int64_t count = 0;
};

// Decodes the slab to x's dtype, at the start of the workspace.
absl::Status Decode(const Context& c, const Slab& slab) {
  const DType dtype = c.args.x.dtype;
  const DeviceWeight& weight = *c.args.weight;
  const KernelRow& row = *weight.plan.dequantize;
  if ((row.outputs & MaskOf(dtype)) == 0) {
    return absl::UnimplementedError(
        absl::StrCat("dense path: ", row.name, " does not decode to ", Name(dtype)));
  }
  return row.dequantize({.weight = &weight,
                         .out = {c.base(), dtype, weight.shape.k, slab.count},
                         .col_begin = slab.begin},
                        c.stream);
}

GemmArgs Product(const Context& c, const Slab& slab, int64_t row, int64_t rows) {
  const MatmulArgs& a = c.args;
  GemmArgs out;
  out.m = rows;
  out.n = slab.count;
  out.k = a.x.cols;
  out.x = static_cast<const char*>(a.x.data) + row * a.x.cols * SizeOf(a.x.dtype);
  out.w = c.base();
  out.in = a.x.dtype;
  out.workspace = c.base() + c.sections.blas_offset();
  out.workspace_bytes = c.sections.blas_bytes;
  return out;
}

// The product as `gemm` says. FP32 results are right wherever the exact sum is finite.
absl::Status Multiply(const GemmArgs& gemm, StreamView stream) {
  AWQD_RETURN_IF_ERROR(Gemm(gemm, stream));
  return gemm.in == DType::kFp32 ? RepairOverflows(gemm, stream) : absl::OkStatus();
}

char* OutputAt(const MatmulArgs& a, int64_t row, int64_t col) {
  return static_cast<char*>(a.y.data) + (row * a.y.cols + col) * SizeOf(a.y.dtype);
}

// Rounds FP32 sums of a slab, rows `ld_sums` apart, to `rows` rows of y from row `row` on.
absl::Status RunEpilogue(const Context& c, const float* sums, int64_t ld_sums, int64_t row,
                         int64_t rows, const Slab& slab) {
  const MatmulArgs& a = c.args;
  return cuda::RunEpilogue({.sums = sums,
                            .ld_sums = ld_sums,
                            .bias = a.bias != nullptr ? a.bias + slab.begin : nullptr,
                            .y = OutputAt(a, row, slab.begin),
                            .ld_y = a.y.cols,
                            .y_dtype = a.y.dtype,
                            .rows = rows,
                            .cols = slab.count},
                           *a.weight->device, c.stream);
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
  return RunEpilogue(c, static_cast<const float*>(gemm.y), a.y.cols, 0, a.x.rows, slab);
}

absl::Status MultiplyThroughScratch(const Context& c, const Slab& slab, int64_t rows_per_pass) {
  for (int64_t row = 0; row < c.args.x.rows; row += rows_per_pass) {
    const int64_t rows = std::min(rows_per_pass, c.args.x.rows - row);
    GemmArgs gemm = Product(c, slab, row, rows);
    gemm.y = c.scratch();
    gemm.ld_y = slab.count;
    gemm.out = DType::kFp32;
    AWQD_RETURN_IF_ERROR(Multiply(gemm, c.stream));
    AWQD_RETURN_IF_ERROR(RunEpilogue(c, c.scratch(), slab.count, row, rows, slab));
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

int64_t SlabColumns(int64_t m, const WeightShape& shape, DType x, const DeviceInfo& device) {
  const int64_t bytes_per_column = shape.k * SlabBytesPerWeight(x);
  const int64_t widest = WidestSlab(shape, bytes_per_column);
  int64_t most = widest;
  if (m >= kManyTokens) {
    most = std::min(widest, L2Columns(shape, bytes_per_column, device));
  } else if (m >= kFewTokens) {
    most = std::min(widest, kMiddleColumns);
  }
  // Equal slabs: a narrow last one would run on a fraction of the GPU.
  const int64_t even = CeilDiv(shape.n, CeilDiv(shape.n, most));
  return std::min(most, RoundUp(even, most >= kTile ? kTile : 8));
}

int64_t ScratchRows(int64_t m, int64_t columns) {
  return std::clamp<int64_t>(kScratchBytes / (columns * 4), 1, std::max<int64_t>(m, 1));
}

Workspace PlanWorkspace(const WeightShape& shape, const DeviceInfo& device) {
  Workspace out;
  for (const DType x : {DType::kFp16, DType::kFp32}) {
    const int64_t bytes_per_column = shape.k * SlabBytesPerWeight(x);
    const int64_t bytes = WidestSlab(shape, bytes_per_column) * bytes_per_column;
    out.slab_bytes = std::max(out.slab_bytes, RoundUp(bytes, kAlign));
  }
  out.scratch_bytes = kScratchBytes;
  out.blas_bytes = device.arch >= 90 ? kBlasBytesHopper : kBlasBytesBefore;
  return out;
}

const KernelRow& MatmulA16Row() {
  static const KernelRow row = {.name = "dense/matmul_a16",
                                .op = Op::kMatmul,
                                .path = Path::kDequantize,
                                .device = DeviceKind::kCuda,
                                .claims = kEverything,
                                .min_arch = 80,
                                .refuses = Refuses,
                                .workspace_bytes = WorkspaceBytes,
                                .matmul = Matmul};
  return row;
}

const KernelRow& MatmulFp16Row() {
  static const KernelRow row = [] {
    KernelRow out = MatmulA16Row();
    out.name = "dense/matmul_fp16";
    out.inputs = MaskOf(DType::kFp16) | MaskOf(DType::kFp32);
    out.min_arch = 75;
    out.max_arch = 79;
    return out;
  }();
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
    const Slab slab{begin, std::min(columns, shape.n - begin)};
    AWQD_RETURN_IF_ERROR(Decode(context, slab));
    AWQD_RETURN_IF_ERROR(direct ? MultiplyDirect(context, slab)
                                : MultiplyThroughScratch(context, slab, rows_per_pass));
  }
  return absl::OkStatus();
}

}  // namespace awqd::dense
