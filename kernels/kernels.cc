// The dispatch of Dequantize and QuantizedMatmul to the rows of a weight's plan, between stage and
// finish.
#include "kernels/kernels.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/backends.h"
#include "kernels/base/status.h"
#include "kernels/steps.h"

namespace awqd {
namespace {

constexpr int64_t kAlign = 256;

absl::Status CheckMatmul(const MatmulArgs& args) {
  const WeightShape& shape = args.weight->shape;
  const ConstMatrixView& x = args.x;
  const MatrixView& y = args.y;
  if (x.cols == shape.k && y.cols == shape.n && x.rows == y.rows) return absl::OkStatus();
  return BadValue("matmul",
                  absl::StrCat("x [", x.rows, ", ", x.cols, "] and y [", y.rows, ", ", y.cols, "]"),
                  absl::StrCat("[M, ", shape.k, "] and [M, ", shape.n, "]"));
}

bool Takes(const KernelRow& row, DType x) { return (row.inputs & MaskOf(x)) != 0; }

absl::Status CheckDtypes(const KernelRow& row, DType in, DType out) {
  if (!Takes(row, in)) {
    return absl::InvalidArgumentError(
        absl::StrCat("activations dtype: ", row.name, " does not take ", Name(in)));
  }
  if ((row.outputs & MaskOf(out)) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("output dtype: ", row.name, " does not write ", Name(out)));
  }
  return absl::OkStatus();
}

Path Other(Path path) { return path == Path::kFused ? Path::kDequantize : Path::kFused; }

// Checks a product of INT8 activations. Its results are integers, to which no part of a floating
// product applies.
absl::Status CheckIntegers(const MatmulArgs& args) {
  const DeviceWeight& weight = *args.weight;
  if (weight.plan.integer == nullptr) {
    const std::string why = WhyNoIntegers(weight.shape);
    return why.empty() ? absl::UnimplementedError(absl::StrCat(
                             "activations dtype: got INT8, for which layout ", weight.layout->name,
                             " has no kernel on ", weight.device->info().id))
                       : absl::InvalidArgumentError(absl::StrCat(
                             "activations dtype: got INT8, expected a floating type: ", why));
  }
  if (args.bias != nullptr || weight.factor() != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("activations dtype: got INT8, expected a floating type: the product has a ",
                     args.bias != nullptr ? "bias" : "factor"));
  }
  if (args.activation != ActivationFunction::kNone) {
    return absl::InvalidArgumentError(absl::StrCat("activation function: got ",
                                                   Name(args.activation),
                                                   ", expected none for INT8 activations"));
  }
  return absl::OkStatus();
}

absl::Status CheckQuantized(const MatmulArgs& args) {
  const DeviceWeight& weight = *args.weight;
  if (weight.plan.quantized.empty()) {
    const std::string why = WhyNoQuantizedActivations(weight.shape);
    return why.empty()
               ? absl::UnimplementedError(absl::StrCat(
                     "activation quantization: layout ", weight.layout->name,
                     " has no kernel for quantised activations on ", weight.device->info().id))
               : absl::InvalidArgumentError(
                     absl::StrCat("activation quantization: got INT8 activations with "
                                  "scales, expected none: ",
                                  why));
  }
  const bool int8 = args.x.dtype == DType::kInt8;
  if (int8 && weight.factor() != nullptr) {
    return absl::InvalidArgumentError(
        "activations dtype: got INT8, expected a floating type: the weight has a factor");
  }
  const bool wants_scales = int8 || args.quantization == ActivationQuantization::kStatic;
  if (int8 && args.quantization != ActivationQuantization::kNone) {
    return absl::InvalidArgumentError(
        "activation quantization: got one of INT8 activations, expected none");
  }
  if (wants_scales == (args.scales != nullptr)) return absl::OkStatus();
  return BadValue("activation scales", wants_scales ? "none" : "some",
                  wants_scales ? "one for each token" : "none: each token has its own");
}

bool MustReorder(const DeviceWeight& weight) {
  return weight.sections.Has(Part::kOrder) || weight.sections.Has(Part::kFactor);
}

// The row for m >= 1 tokens of dtype `x`.
const KernelRow* RowFor(const WeightPlan& plan, Op op, Path path, int64_t m, DType x) {
  switch (op) {
    case Op::kIntegerMatmul:
      return plan.integer;
    case Op::kQuantizedActivations:
      return plan.Quantized(m);
    default: {
      const KernelRow* row = plan.Matmul(path, m);
      if (row != nullptr && Takes(*row, x)) return row;
      const KernelRow* other = plan.Matmul(Other(path), m);
      return other != nullptr ? other : row;
    }
  }
}

// The parts of a product's workspace, one after the other.
struct Workspace {
  int64_t row = 0;  // bytes that the row needs
  int64_t staged = 0;
  int64_t sums = 0;  // FP32 [M, N] for finish

  int64_t staged_offset() const { return RoundUp(row, kAlign); }
  int64_t sums_offset() const { return staged_offset() + RoundUp(staged, kAlign); }
  int64_t total() const { return sums_offset() + sums; }
};

// Covers any type and alignment of x, because neither is known when the workspace is allocated.
Workspace PlanWorkspace(const DeviceWeight& weight, const KernelRow& row, int64_t m,
                        ActivationFunction activation) {
  const WeightShape& shape = weight.shape;
  Workspace out;
  if (row.workspace_bytes != nullptr) {
    out.row = row.workspace_bytes(shape, weight.device->info(), m);
  }
  if (row.staged != Staged::kAny || MustReorder(weight)) {
    out.staged = StepsOf(*weight.device).staged_bytes(row.staged, m, shape.k);
  }
  if (activation != ActivationFunction::kNone) out.sums = m * shape.n * 4;
  return out;
}

absl::Status Stage(const MatmulArgs& args, const KernelRow& row, void* out, MatmulArgs* staged,
                   StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const Steps& steps = StepsOf(*weight.device);
  staged->quantization = ActivationQuantization::kNone;
  staged->x_scale = args.scales;
  if (!MustReorder(weight) && steps.ready(row.staged, args.x)) return absl::OkStatus();
  PrologueResult tokens;
  AWQD_RETURN_IF_ERROR(steps.stage({.x = args.x,
                                    .order = weight.order(),
                                    .factor = weight.factor(),
                                    .want = row.staged,
                                    .quantization = args.quantization,
                                    .scales = args.scales,
                                    .out = out},
                                   &tokens, *weight.device, stream));
  staged->staged = true;
  staged->x = tokens.x;
  staged->x_stride = tokens.stride;
  if (tokens.scale != nullptr) staged->x_scale = tokens.scale;
  return absl::OkStatus();
}

absl::Status Run(const MatmulArgs& args, const KernelRow& row, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const Workspace at = PlanWorkspace(weight, row, args.x.rows, args.activation);
  char* const workspace = static_cast<char*>(args.workspace);
  MatmulArgs product = args;
  AWQD_RETURN_IF_ERROR(Stage(args, row, workspace + at.staged_offset(), &product, stream));
  if (args.activation == ActivationFunction::kNone) return row.matmul(product, stream);
  float* const sums = reinterpret_cast<float*>(workspace + at.sums_offset());
  product.activation = ActivationFunction::kNone;
  product.bias = nullptr;
  product.y = {sums, DType::kFp32, args.y.rows, args.y.cols};
  AWQD_RETURN_IF_ERROR(row.matmul(product, stream));
  return StepsOf(*weight.device)
      .finish({.sums = sums,
               .ld_sums = args.y.cols,
               .bias = args.bias,
               .activation = args.activation,
               .y = args.y.data,
               .ld_y = args.y.cols,
               .y_dtype = args.y.dtype,
               .rows = args.y.rows,
               .cols = args.y.cols},
              *weight.device, stream);
}

// --- Blocks of a weight with an order ---

constexpr int64_t kReorderBytes = int64_t{64} << 20;

// The number of columns whose rows all fit, at least 8.
int64_t ReorderColumns(const DeviceWeight& weight, int64_t cols, DType out) {
  const int64_t fitting = kReorderBytes / (weight.shape.k * SizeOf(out)) / 8 * 8;
  return std::min(cols, std::max<int64_t>(8, fitting));
}

absl::Status DequantizeReordered(const DequantizeArgs& args, void* workspace, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  const int64_t size = SizeOf(args.out.dtype);
  const int64_t step = ReorderColumns(weight, args.out.cols, args.out.dtype);
  for (int64_t col = 0; col < args.out.cols; col += step) {
    const int64_t cols = std::min(step, args.out.cols - col);
    const DequantizeArgs block = {
        &weight, {workspace, args.out.dtype, weight.shape.k, cols}, 0, args.col_begin + col};
    AWQD_RETURN_IF_ERROR(weight.plan.dequantize->dequantize(block, stream));
    AWQD_RETURN_IF_ERROR(StepsOf(*weight.device)
                             .reorder({.in = workspace,
                                       .order = weight.order(),
                                       .k = weight.shape.k,
                                       .cols = cols,
                                       .element_bytes = size,
                                       .row_begin = args.row_begin,
                                       .rows = args.out.rows,
                                       .out = static_cast<char*>(args.out.data) + col * size,
                                       .ld_out = args.out.cols},
                                      *weight.device, stream));
  }
  return absl::OkStatus();
}

}  // namespace

Op ProductOf(const MatmulArgs& args) {
  if (args.quantization != ActivationQuantization::kNone) return Op::kQuantizedActivations;
  if (args.x.dtype != DType::kInt8) return Op::kMatmul;
  return args.scales == nullptr ? Op::kIntegerMatmul : Op::kQuantizedActivations;
}

int64_t WorkspaceBytes(const DeviceWeight& weight, Path path, int64_t m,
                       ActivationFunction activation, Op op) {
  const WeightPlan& plan = weight.plan;
  if (op == Op::kIntegerMatmul) {
    return plan.integer == nullptr ? 0
                                   : PlanWorkspace(weight, *plan.integer, m, activation).total();
  }
  if (op == Op::kQuantizedActivations) path = Path::kFused;
  const std::vector<PlanEntry>& entries = op == Op::kMatmul ? plan.matmul : plan.quantized;
  // Activations that no row of this path accepts use the other path.
  const bool both = std::any_of(entries.begin(), entries.end(), [&](const PlanEntry& entry) {
    return entry.path == path && entry.row->inputs != kFloatingMask;
  });
  int64_t bytes = 0;
  for (const PlanEntry& entry : entries) {
    if ((entry.path != path && !(both && op == Op::kMatmul)) || entry.min_m > m) continue;
    const int64_t at = entry.max_m < 0 ? m : std::min(m, entry.max_m);
    bytes = std::max(bytes, PlanWorkspace(weight, *entry.row, at, activation).total());
  }
  return bytes;
}

absl::Status QuantizedMatmul(const MatmulArgs& args, Path path, StreamView stream,
                             const KernelRow** ran) {
  AWQD_RETURN_IF_ERROR(CheckMatmul(args));
  const int64_t m = std::max<int64_t>(args.x.rows, 1);
  const Op op = ProductOf(args);
  if (op == Op::kIntegerMatmul) AWQD_RETURN_IF_ERROR(CheckIntegers(args));
  if (op == Op::kQuantizedActivations) AWQD_RETURN_IF_ERROR(CheckQuantized(args));
  const KernelRow* row = RowFor(args.weight->plan, op, path, m, args.x.dtype);
  if (row == nullptr) {
    return absl::UnimplementedError(absl::StrCat("no kernel in the plan for M = ", m));
  }
  AWQD_RETURN_IF_ERROR(CheckDtypes(*row, args.x.dtype, args.y.dtype));
  if (ran != nullptr) *ran = row;
  return args.x.rows == 0 ? absl::OkStatus() : Run(args, *row, stream);
}

int64_t DequantizeWorkspaceBytes(const DeviceWeight& weight, int64_t cols, DType out) {
  if (!weight.sections.Has(Part::kOrder)) return 0;
  return weight.shape.k * ReorderColumns(weight, cols, out) * SizeOf(out);
}

absl::Status Dequantize(const DequantizeArgs& args, void* workspace, StreamView stream,
                        const KernelRow** ran) {
  const WeightShape& shape = args.weight->shape;
  if (args.row_begin < 0 || args.col_begin < 0 || args.out.rows < 0 || args.out.cols < 0 ||
      args.row_begin > shape.k - args.out.rows || args.col_begin > shape.n - args.out.cols) {
    return BadValue("dequantize",
                    absl::StrCat("rows ", args.row_begin, " + ", args.out.rows, " and columns ",
                                 args.col_begin, " + ", args.out.cols),
                    absl::StrCat("a block of [", shape.k, ", ", shape.n, "]"));
  }
  const KernelRow* row = args.weight->plan.dequantize;
  AWQD_RETURN_IF_ERROR(CheckDtypes(*row, DType::kFp16, args.out.dtype));
  if (ran != nullptr) *ran = row;
  if (args.out.rows == 0 || args.out.cols == 0) return absl::OkStatus();
  if (args.weight->sections.Has(Part::kOrder)) return DequantizeReordered(args, workspace, stream);
  return row->dequantize(args, stream);
}

absl::Status GatherRows(const GatherArgs& args, Device& device, StreamView stream) {
  if (args.count == 0 || args.row_bytes == 0) return absl::OkStatus();
  return StepsOf(device).gather(args, device, stream);
}

absl::Status MultiplyByUp(const GateArgs& args, Device& device, StreamView stream) {
  return args.count == 0 ? absl::OkStatus() : StepsOf(device).gate(args, device, stream);
}

absl::Status CombineRows(const CombineArgs& args, Device& device, StreamView stream) {
  if (args.count == 0 || args.cols == 0) return absl::OkStatus();
  return StepsOf(device).combine(args, device, stream);
}

}  // namespace awqd
