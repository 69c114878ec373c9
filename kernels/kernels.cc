// The dispatch of Dequantize, QuantizedMatmul and the products of experts to the rows of a weight's
// plan, between prologue and epilogue.
#include "kernels/kernels.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/backends.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"
#include "kernels/steps.h"

namespace awqd {
namespace {

constexpr int64_t kAlign = 256;
constexpr absl::string_view kNoInt8 = "activations dtype: got INT8, expected a floating type: ";

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
    return Invalid("activations dtype: ", row.name, " does not take ", Name(in));
  }
  if ((row.outputs & MaskOf(out)) == 0) {
    return Invalid("output dtype: ", row.name, " does not write ", Name(out));
  }
  return absl::OkStatus();
}

// For people: the part of the weight that INT8 activations cannot have; empty without.
absl::string_view InputTransform(const DeviceWeight& weight) {
  if (weight.hadamard.size > 0) return "transform";
  return weight.factor() != nullptr ? "factor" : "";
}

Path Other(Path path) { return path == Path::kFused ? Path::kDequantize : Path::kFused; }

// Checks a product of INT8 activations. Its results are integers, to which no part of a floating
// product applies.
absl::Status CheckIntegers(const MatmulArgs& args) {
  const DeviceWeight& weight = *args.weight;
  if (weight.plan.integer.empty()) {
    const std::string why = WhyNoIntegers(weight.shape);
    if (!why.empty()) return Invalid(kNoInt8, why);
    return absl::UnimplementedError(absl::StrCat("activations dtype: got INT8, for which layout ",
                                                 weight.layout->name, " has no kernel on ",
                                                 weight.device->info().id));
  }
  if (args.bias != nullptr || weight.transforms_input()) {
    return Invalid(kNoInt8, "the product has a ",
                   args.bias != nullptr ? "bias" : InputTransform(weight));
  }
  if (args.activation != ActivationFunction::kNone) {
    return Invalid("activation function: got ", Name(args.activation),
                   ", expected none for INT8 activations");
  }
  return absl::OkStatus();
}

// The weight whose order, factor and transform are those of the product.
const DeviceWeight& WeightOf(const MatmulArgs& args) { return *args.weight; }
const DeviceWeight& WeightOf(const GroupedArgs& args) { return *args.experts.front(); }

bool HasCodes(const ConstMatrixView& x) { return x.dtype == DType::kE4m3; }

// The type in which rows see x: the prologue gives E4M3 to rows that do not read it in FP32.
DType SeenDType(const ConstMatrixView& x) { return HasCodes(x) ? DType::kFp32 : x.dtype; }

// Checks a product of activations that are E4M3 already.
absl::Status CheckCodes(const DeviceWeight& weight, ActivationQuantization quantization) {
  constexpr absl::string_view kNoCodes = "activations dtype: got E4M3, expected a floating type: ";
  if (weight.transforms_input()) {
    return Invalid(kNoCodes, "the weight has a ", InputTransform(weight));
  }
  const bool blocks = quantization == ActivationQuantization::kFloat8PerBlock;
  if (blocks && weight.sections.Has(Part::kOrder)) {
    return Invalid(kNoCodes, "the weight's order mixes the blocks of in-features that have scales");
  }
  if (blocks || quantization == ActivationQuantization::kFloat8Static) return absl::OkStatus();
  return Invalid("activation quantization: got one of E4M3 activations, expected none");
}

// Args: MatmulArgs or GroupedArgs.
template <typename Args>
absl::Status CheckFloat8(const Args& args) {
  bool wants_scales = HasGivenScales(args.quantization);
  if (HasCodes(args.x)) {
    AWQD_RETURN_IF_ERROR(CheckCodes(WeightOf(args), args.quantization));
    wants_scales = true;
  } else if (!IsFloating(args.x.dtype)) {
    return Invalid("activation quantization: got one of ", Name(args.x.dtype),
                   " activations, expected none");
  }
  if (wants_scales == (args.scales != nullptr)) return absl::OkStatus();
  return BadValue("activation scales", wants_scales ? "none" : "some",
                  wants_scales ? "one for each token" : "none: each token has its own");
}

absl::Status CheckQuantized(const MatmulArgs& args) {
  const DeviceWeight& weight = *args.weight;
  if (weight.plan.quantized.empty()) {
    const std::string why = WhyNoQuantizedActivations(weight.shape);
    if (!why.empty()) {
      return Invalid("activation quantization: got INT8 activations with scales, expected none: ",
                     why);
    }
    return absl::UnimplementedError(
        absl::StrCat("activation quantization: layout ", weight.layout->name,
                     " has no kernel for quantised activations on ", weight.device->info().id));
  }
  const bool int8 = args.x.dtype == DType::kInt8;
  if (int8 && weight.transforms_input()) {
    return Invalid(kNoInt8, "the weight has a ", InputTransform(weight));
  }
  const bool wants_scales = int8 || args.quantization == ActivationQuantization::kStatic;
  if (int8 && args.quantization != ActivationQuantization::kNone) {
    return Invalid("activation quantization: got one of INT8 activations, expected none");
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
      return plan.Integer(m);
    case Op::kQuantizedActivations:
      return plan.Quantized(m);
    case Op::kFloat8Activations:
      if (const KernelRow* row = path == Path::kFused ? plan.Float8(m) : nullptr) return row;
      [[fallthrough]];
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
  int64_t row = 0;        // bytes that the row needs
  int64_t transform = 0;  // the result of the transform
  int64_t prologue = 0;   // x in the form that the row reads
  int64_t sums = 0;       // FP32 [M, N] for the epilogue; 0: in y

  int64_t transform_offset() const { return RoundUp(row, kAlign); }
  int64_t prologue_offset() const { return transform_offset() + RoundUp(transform, kAlign); }
  int64_t sums_offset() const { return prologue_offset() + RoundUp(prologue, kAlign); }
  int64_t total() const { return sums_offset() + sums; }
};

// Covers any type and alignment of x, because neither is known when the workspace is allocated.
Workspace PlanWorkspace(const DeviceWeight& weight, const KernelRow& row, int64_t m,
                        ActivationFunction activation, bool float8 = false) {
  const WeightShape& shape = weight.shape;
  Workspace out;
  if (row.workspace_bytes != nullptr) {
    out.row = row.workspace_bytes(shape, weight.device->info(), m);
  }
  if (weight.hadamard.size > 0) out.transform = m * shape.k * 4;
  if (row.input_form != InputForm::kAny || MustReorder(weight) || float8) {
    out.prologue = StepsOf(*weight.device).prologue_bytes(row.input_form, m, shape.k);
  }
  if (activation != ActivationFunction::kNone) out.sums = m * shape.n * 4;
  return out;
}

Workspace PlanWorkspace(const GroupedArgs& args, const KernelRow& row) {
  Workspace out = PlanWorkspace(*args.experts.front(), row, args.rows(), ActivationFunction::kNone,
                                IsFloat8(args.quantization));
  if (args.activation != ActivationFunction::kNone && args.y.dtype != DType::kFp32) {
    out.sums = args.y.rows * args.y.cols * 4;
  }
  return out;
}

// Runs transform, prologue, product and epilogue. Args: MatmulArgs or GroupedArgs. `product`: the
// row's copy of `args`, whose x and y are replaced. `bias`: added by the epilogue.
template <typename Args>
absl::Status RunSteps(const Args& args, const DeviceWeight& weight, const KernelRow& row,
                      const Workspace& at, PrologueArgs prologue, const float* bias, Args product,
                      absl::Status (*run)(const Args&, StreamView), StreamView stream) {
  const Steps& steps = StepsOf(*weight.device);
  const bool float8 = IsFloat8(prologue.quantization);
  char* const workspace = static_cast<char*>(args.workspace);
  prologue.x = args.x;
  if (weight.hadamard.size > 0) {
    AWQD_ASSIGN_OR_RETURN(
        prologue.x,
        steps.transform_rows({.x = args.x,
                              .factor = std::exchange(prologue.factor, nullptr),
                              .hadamard = weight.hadamard,
                              .form = float8 ? InputForm::kTensorCoreFloat8 : row.input_form,
                              .out = workspace + at.transform_offset()},
                             *weight.device, stream));
    product.x = prologue.x;
    if constexpr (requires { product.from_prologue; }) product.from_prologue = true;
  }
  if (prologue.order != nullptr || prologue.factor != nullptr || float8 ||
      !steps.needs_no_prologue(row.input_form, prologue.x)) {
    prologue.form = row.input_form;
    prologue.out = workspace + at.prologue_offset();
    PrologueResult tokens;
    AWQD_RETURN_IF_ERROR(steps.run_prologue(prologue, &tokens, *weight.device, stream));
    product.x = tokens.x;
    product.x_stride = tokens.stride;
    if (tokens.scale != nullptr) product.x_scale = tokens.scale;
    product.x_scale_stride = tokens.scale_stride;
    if constexpr (requires { product.from_prologue; }) product.from_prologue = true;
  }
  if (args.activation == ActivationFunction::kNone) return run(product, stream);
  void* const sums = at.sums > 0 ? workspace + at.sums_offset() : args.y.data;
  product.activation = ActivationFunction::kNone;
  product.y = {sums, DType::kFp32, args.y.rows, args.y.cols};
  AWQD_RETURN_IF_ERROR(run(product, stream));
  return steps.run_epilogue({.sums = static_cast<const float*>(sums),
                             .ld_sums = args.y.cols,
                             .bias = bias,
                             .activation = args.activation,
                             .y = args.y.data,
                             .ld_y = args.y.cols,
                             .y_dtype = args.y.dtype,
                             .rows = args.y.rows,
                             .cols = args.y.cols,
                             .mask = prologue.mask},
                            *weight.device, stream);
}

absl::Status Run(const MatmulArgs& args, const KernelRow& row, StreamView stream) {
  const DeviceWeight& weight = *args.weight;
  MatmulArgs product = args;
  product.quantization = ActivationQuantization::kNone;
  const bool float8 = IsFloat8(args.quantization);
  product.x_scale = float8 ? nullptr : args.scales;
  if (args.activation != ActivationFunction::kNone) product.bias = nullptr;
  return RunSteps(args, weight, row,
                  PlanWorkspace(weight, row, args.x.rows, args.activation, float8),
                  {.order = weight.order(),
                   .factor = weight.factor(),
                   .quantization = args.quantization,
                   .scales = args.scales},
                  args.bias, product, row.matmul, stream);
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
                             .reorder_rows({.in = workspace,
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

// --- A stack of experts ---

// Whether one kernel can compute both with the same parameters.
bool IsLike(const DeviceWeight& a, const DeviceWeight& b) {
  return a.shape.k == b.shape.k && a.shape.n == b.shape.n && a.shape.scheme == b.shape.scheme &&
         a.layout == b.layout;
}

// Calls fn(expert) for each expert that has rows, until it returns false. Returns whether it never
// did.
template <typename Fn>
bool EveryActive(const GroupedArgs& args, Fn fn) {
  if (args.device_experts > 0) {
    return std::all_of(args.experts.begin(), args.experts.end(),
                       [&](const DeviceWeight* first) { return fn(*first); });
  }
  int64_t begin = 0;
  for (size_t i = 0; i < args.experts.size(); ++i) {
    const size_t e = i % args.ends.size();
    if (e == 0) begin = 0;
    if (args.ends[e] > begin && !fn(*args.experts[i])) return false;
    begin = args.ends[e];
  }
  return true;
}

}  // namespace

Op ProductOf(const MatmulArgs& args) {
  if (IsFloat8(args.quantization)) return Op::kFloat8Activations;
  if (args.quantization != ActivationQuantization::kNone) return Op::kQuantizedActivations;
  if (args.x.dtype != DType::kInt8) return Op::kMatmul;
  return args.scales == nullptr ? Op::kIntegerMatmul : Op::kQuantizedActivations;
}

int64_t WorkspaceBytes(const DeviceWeight& weight, Path path, int64_t m,
                       ActivationFunction activation, Op op) {
  const WeightPlan& plan = weight.plan;
  const bool float8 = op == Op::kFloat8Activations;
  const bool floating = op == Op::kMatmul || float8;
  if (!floating) path = Path::kFused;
  int64_t bytes = 0;
  const auto cover = [&](const PlanEntry& entry) {
    if (entry.min_m > m) return;
    const int64_t at = entry.max_m < 0 ? m : std::min(m, entry.max_m);
    bytes = std::max(bytes, PlanWorkspace(weight, *entry.row, at, activation, float8).total());
  };
  if (float8) std::for_each(plan.float8.begin(), plan.float8.end(), cover);
  const std::vector<PlanEntry>& entries = floating                   ? plan.matmul
                                          : op == Op::kIntegerMatmul ? plan.integer
                                                                     : plan.quantized;
  // Activations that no row of this path accepts use the other path.
  const bool both = std::any_of(entries.begin(), entries.end(), [&](const PlanEntry& entry) {
    return entry.path == path && entry.row->inputs != kFloatingMask;
  });
  for (const PlanEntry& entry : entries) {
    if (entry.path == path || (both && floating)) cover(entry);
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
  if (op == Op::kFloat8Activations) AWQD_RETURN_IF_ERROR(CheckFloat8(args));
  const DType x = op == Op::kFloat8Activations ? SeenDType(args.x) : args.x.dtype;
  const KernelRow* row = RowFor(args.weight->plan, op, path, m, x);
  if (row == nullptr) {
    return absl::UnimplementedError(absl::StrCat("no kernel in the plan for M = ", m));
  }
  AWQD_RETURN_IF_ERROR(CheckDtypes(*row, x, args.y.dtype));
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

bool IsGroupable(const DeviceWeight& weight, const DeviceWeight& first) {
  return IsLike(weight, first) && !weight.sections.Has(Part::kOrder) && !weight.transforms_input();
}

const KernelRow* GroupedRow(const GroupedArgs& args) {
  if (args.rows() == 0) return nullptr;
  const int64_t mean = args.mean();
  const bool float8 = IsFloat8(args.quantization);
  const KernelRow* row = nullptr;
  const bool alike = EveryActive(args, [&](const DeviceWeight& weight) {
    const KernelRow* own = float8 ? weight.plan.GroupedFloat8(mean) : nullptr;
    if (own == nullptr) own = weight.plan.Grouped(mean);
    // Products of their own, which would be faster, are for a host that knows the rows.
    if (own == nullptr && args.device_experts > 0 && !weight.plan.grouped.empty()) {
      own = weight.plan.grouped.back().row;
    }
    if (row == nullptr) row = own;
    return own != nullptr && own == row && IsGroupable(weight, *args.experts.front());
  });
  return alike && Takes(*row, float8 ? SeenDType(args.x) : args.x.dtype) ? row : nullptr;
}

int64_t GroupedWorkspaceBytes(const GroupedArgs& args, const KernelRow& row) {
  return PlanWorkspace(args, row).total();
}

// A tile has a row at least.
int64_t GroupedTableBytes(const GroupedArgs& args) {
  return args.rows() * args.stacks() * StepsOf(*args.experts.front()->device).grouped_tile_bytes;
}

absl::Status MakeGroupedTable(const GroupedTableArgs& args, Device& device, StreamView stream) {
  return StepsOf(device).make_grouped_table(args, device, stream);
}

absl::Status GroupedMatmul(const GroupedArgs& args, const KernelRow& row, StreamView stream) {
  GroupedArgs product = args;
  product.quantization = ActivationQuantization::kNone;
  if (IsFloat8(args.quantization)) AWQD_RETURN_IF_ERROR(CheckFloat8(args));
  return RunSteps(args, *args.experts.front(), row, PlanWorkspace(args, row),
                  {.quantization = args.quantization,
                   .scales = args.scales,
                   .gather = args.gather,
                   .gate = args.gate,
                   .count = args.rows(),
                   .mask = args.mask,
                   .sums_factor = args.sums_factor},
                  nullptr, product, row.grouped, stream);
}

absl::Status SortChoices(const SortArgs& args, Device& device, StreamView stream) {
  return args.choices == 0 ? absl::OkStatus() : StepsOf(device).sort_choices(args, device, stream);
}

absl::Status GatherRows(const GatherArgs& args, Device& device, StreamView stream) {
  if (args.count == 0 || args.row_bytes == 0) return absl::OkStatus();
  return StepsOf(device).gather_rows(args, device, stream);
}

absl::Status MultiplyByUp(const GateArgs& args, Device& device, StreamView stream) {
  return args.count == 0 ? absl::OkStatus() : StepsOf(device).multiply_by_up(args, device, stream);
}

absl::Status GateTokens(const TokenGateArgs& args, Device& device, StreamView stream) {
  return args.x.rows == 0 ? absl::OkStatus() : StepsOf(device).gate_tokens(args, device, stream);
}

absl::Status CombineRows(const CombineArgs& args, Device& device, StreamView stream) {
  if (args.count == 0 || args.cols == 0) return absl::OkStatus();
  return StepsOf(device).combine_rows(args, device, stream);
}

}  // namespace awqd
