// Experts of awqd.h: stacks, and products of the tokens that a router sends to them. Which rows an
// expert has is known to the device alone: nothing here depends on it but on a CPU, whose experts
// multiply one by one.
#include "kernels/checkpoint/experts.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/base/math.h"
#include "kernels/kernels.h"
#include "kernels/library/arguments.h"
#include "kernels/library/objects.h"

namespace awqd::library {
namespace {

std::string ShapeText(const WeightShape& shape) {
  return absl::StrCat("[", shape.k, ", ", shape.n, "]");
}

bool IsOnGpu(const awqd_stack& stack) { return !stack.device->host_addressable(); }

// Copies the addresses of the experts' parts to the GPU.
absl::StatusOr<Buffer> CopyParts(const awqd_stack& stack) {
  std::vector<ExpertParts> parts;
  for (const auto& expert : stack.experts) {
    parts.push_back({expert->codes(), expert->outer(), expert->bias()});
  }
  Device& device = *stack.device;
  const auto bytes = static_cast<int64_t>(parts.size() * sizeof(ExpertParts));
  AWQD_ASSIGN_OR_RETURN(Buffer out, device.Allocate(MemoryKind::kWeights, bytes));
  AWQD_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device.CreateCopyStream());
  AWQD_RETURN_IF_ERROR(device.CopyToDevice(out.data(), parts.data(), bytes, stream->view()));
  AWQD_RETURN_IF_ERROR(stream->Synchronize());
  return out;
}

absl::Status MakeStack(absl::Span<const awqd_weight* const> weights, awqd_stack** out) {
  AWQD_RETURN_IF_ERROR(CheckPointer("stack", out));
  if (weights.empty() || weights.size() > static_cast<size_t>(model::kMaxExperts)) {
    return BadValue("count", weights.size(), absl::StrCat("1 to ", model::kMaxExperts));
  }
  auto stack = std::make_unique<awqd_stack>();
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::string name = absl::StrCat("weights[", i, "]");
    AWQD_RETURN_IF_ERROR(CheckPointer(name, weights[i]));
    const awqd_weight& first = *weights[0];
    const WeightShape &shape = weights[i]->weight->shape, &expected = first.weight->shape;
    if (weights[i]->device != first.device) {
      return BadValue(name, absl::StrCat("a weight on ", weights[i]->device->info().id),
                      "one of the same awqd_device as weights[0]");
    }
    if (shape.k != expected.k || shape.n != expected.n) {
      return BadValue(name, ShapeText(shape), ShapeText(expected));
    }
    stack->alike = stack->alike && IsGroupable(*weights[i]->weight, *first.weight);
    stack->has_bias = stack->has_bias || weights[i]->weight->bias() != nullptr;
    stack->experts.push_back(weights[i]->weight);
  }
  stack->device = weights[0]->device;
  if (IsOnGpu(*stack)) {
    if (!stack->alike || stack->experts[0]->plan.grouped.empty()) {
      return absl::UnimplementedError(absl::StrCat(
          "weights: no kernel of ", stack->device->info().id, " multiplies by all of these, ",
          weights[0]->scheme, stack->alike ? "" : ": they differ, or reorder or transform x"));
    }
    AWQD_ASSIGN_OR_RETURN(stack->parts, CopyParts(*stack));
  }
  *out = stack.release();
  return absl::OkStatus();
}

// Divides a workspace; without one it counts.
class Room {
 public:
  explicit Room(void* data) : data_(static_cast<char*>(data)) {}
  void* TakeBytes(int64_t bytes) {
    char* const out = data_ == nullptr ? nullptr : data_ + used_;
    used_ += RoundUp(bytes, kAlign);
    return out;
  }
  template <typename T>
  T* TakeArray(int64_t count) {
    return static_cast<T*>(TakeBytes(count * static_cast<int64_t>(sizeof(T))));
  }
  int64_t used() const { return used_; }

 private:
  char* data_;
  int64_t used_ = 0;
};

void* AtOffset(void* data, int64_t bytes) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + bytes;
}

// The products of one stack, or on a GPU of two by one kernel.
struct StackProduct {
  absl::InlinedVector<const awqd_stack*, 2> stacks;
  absl::InlinedVector<const DeviceWeight*, 2> firsts;
  GroupedArgs args;                // but for `experts`
  void* table = nullptr;           // on a GPU, as `row`
  const KernelRow* row = nullptr;  // null: there are no rows

  GroupedArgs Whole() const {
    GroupedArgs out = args;
    out.experts = firsts;
    out.table = table;
    return out;
  }
};

constexpr int64_t kMostRows = int64_t{1} << 30;

// A call: choices are sorted, rows gathered, multiplied and combined. With a mask `sort` has the
// number of rows and experts alone, and rows are multiplied where they are.
struct ExpertsCall {
  Device* device = nullptr;
  bool on_gpu = false;
  RowMask mask;
  SortArgs sort;
  GatherArgs gather;
  absl::InlinedVector<StackProduct, 3> products;
  GateArgs gate;                  // before the last product, if count > 0
  bool gate_in_prologue = false;  // of the last product
  CombineArgs combine;
  void* workspace = nullptr;  // of one product at a time
  int64_t bytes = 0;          // of everything

  ConstMatrixView x(DType dtype, int64_t k) const { return {gather.out, dtype, sort.choices, k}; }
};

// Only those that a device can make for each row by itself.
absl::StatusOr<ActivationQuantization> ToRowQuantization(int32_t quantization) {
  AWQD_ASSIGN_OR_RETURN(const ActivationQuantization out, ToQuantization(quantization));
  const bool rounds = IsFloat8(out) && !HasGivenScales(out);
  if (rounds || out == ActivationQuantization::kNone) return out;
  return BadValue("args->quantization", quantization,
                  "AWQD_UNQUANTIZED, AWQD_FP8_PER_TOKEN or AWQD_FP8_PER_BLOCK_128 of experts");
}

// The arguments that both kinds of calls have.
template <typename Args>
absl::Status ReadChoices(const Args& args, const awqd_stack& first, const awqd_stack& last,
                         Room* room, ExpertsCall* call) {
  AWQD_RETURN_IF_ERROR(CheckTokens(args.m));
  const int64_t most = kMostRows / std::max<int64_t>(args.m, 1);
  if (args.top_k < 1 || args.top_k > most) {
    return BadValue("args->top_k", args.top_k,
                    absl::StrCat("at least 1, and at most ", kMostRows, " for all tokens"));
  }
  AWQD_ASSIGN_OR_RETURN(const DType x, ToFloating("args->x_dtype", args.x_dtype));
  AWQD_ASSIGN_OR_RETURN(const DType y, ToFloating("args->y_dtype", args.y_dtype));
  const int64_t rows = args.m * args.top_k, n = last.shape().n;
  const int64_t row_bytes = first.shape().k * SizeOf(x);
  const auto experts = static_cast<int64_t>(first.experts.size());
  call->device = first.device.get();
  call->on_gpu = IsOnGpu(first);
  call->sort = {.ids = args.expert_ids,
                .choices = rows,
                .top_k = args.top_k,
                .experts = experts,
                .ends = room->TakeArray<int32_t>(experts),
                .tokens = room->TakeArray<int32_t>(rows),
                .rows = room->TakeArray<int32_t>(rows)};
  call->gather = {.in = args.x,
                  .rows = call->sort.tokens,
                  .count = rows,
                  .row_bytes = row_bytes,
                  .out = room->TakeBytes(rows * row_bytes)};
  const bool summed = args.router_weights != nullptr;
  call->combine = {.in = room->TakeBytes(rows * n * 4),
                   .cols = n,
                   .rows = call->sort.rows,
                   .weights = args.router_weights,
                   .count = summed ? args.m : rows,
                   .terms = summed ? args.top_k : 1,
                   .y = args.y,
                   .y_dtype = y};
  return absl::OkStatus();
}

absl::Status AddProduct(absl::InlinedVector<const awqd_stack*, 2> stacks, const GroupedArgs& args,
                        Room* room, ExpertsCall* call) {
  StackProduct& product = call->products.emplace_back();
  product.args = args;
  for (const awqd_stack* stack : stacks) product.firsts.push_back(stack->experts[0].get());
  product.stacks = std::move(stacks);
  if (!call->on_gpu) return absl::OkStatus();
  product.args.device_experts = call->sort.experts;
  const GroupedArgs whole = product.Whole();
  product.table = room->TakeBytes(GroupedTableBytes(whole));
  if (whole.rows() == 0) return absl::OkStatus();
  product.row = GroupedRow(whole);
  if (product.row != nullptr) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("args->x_dtype: no kernel multiplies ",
                                               Name(args.x.dtype), " by these experts"));
}

int64_t WorkspaceOf(const StackProduct& product, const ExpertsCall& call) {
  int64_t bytes = 0;
  if (call.on_gpu) {
    const GroupedArgs whole = product.Whole();
    const WeightPlan& plan = product.firsts[0]->plan;
    for (const auto* rows : {&plan.grouped, &plan.grouped_float8}) {
      for (const PlanEntry& entry : *rows) {
        bytes = std::max(bytes, GroupedWorkspaceBytes(whole, *entry.row));
      }
    }
    return bytes;
  }
  const awqd_stack& stack = *product.stacks[0];
  ConstMatrixView x = product.args.x;
  if (call.mask.max_rows > 0) x.rows = call.mask.max_rows;
  const size_t different = stack.alike ? 1 : stack.experts.size();
  for (const auto& expert : absl::MakeConstSpan(stack.experts).first(different)) {
    bytes = std::max(bytes, BytesOf({.weight = expert.get(),
                                     .x = x,
                                     .y = product.args.y,
                                     .activation = product.args.activation,
                                     .quantization = product.args.quantization},
                                    ChoosePath(*expert, x.rows, product.args.quantization)));
  }
  return bytes;
}

void TakeWorkspace(Room* room, ExpertsCall* call) {
  int64_t bytes = 0;
  for (const StackProduct& product : call->products) {
    bytes = std::max(bytes, WorkspaceOf(product, *call));
  }
  call->workspace = room->TakeBytes(bytes);
  call->bytes = room->used();
}

absl::StatusOr<ExpertsCall> ReadGroupedMatmul(const awqd_stack* stack,
                                              const awqd_grouped_matmul_args* args, void* data) {
  AWQD_RETURN_IF_ERROR(CheckPointer("stack", stack));
  AWQD_RETURN_IF_ERROR(CheckStructure("args", args));
  ExpertsCall call;
  Room room(data);
  AWQD_RETURN_IF_ERROR(ReadChoices(*args, *stack, *stack, &room, &call));
  AWQD_ASSIGN_OR_RETURN(const DType x, ToFloating("args->x_dtype", args->x_dtype));
  GroupedArgs product = {.x = call.x(x, stack->shape().k),
                         .y = {const_cast<void*>(call.combine.in), DType::kFp32, call.sort.choices,
                               call.combine.cols}};
  AWQD_ASSIGN_OR_RETURN(product.activation, ToSingleActivation(args->activation));
  AWQD_ASSIGN_OR_RETURN(product.quantization, ToRowQuantization(args->quantization));
  AWQD_RETURN_IF_ERROR(AddProduct({stack}, product, &room, &call));
  TakeWorkspace(&room, &call);
  return call;
}

absl::StatusOr<ExpertsCall> ReadMaskedMatmul(const awqd_stack* stack,
                                             const awqd_masked_matmul_args* args, void* data) {
  AWQD_RETURN_IF_ERROR(CheckPointer("stack", stack));
  AWQD_RETURN_IF_ERROR(CheckStructure("args", args));
  const auto experts = static_cast<int64_t>(stack->experts.size());
  if (args->max_rows < 0 || args->max_rows > kMostRows / experts) {
    return BadValue("args->max_rows", args->max_rows, absl::StrCat("0 to ", kMostRows / experts));
  }
  if (args->expected_rows < 0 || args->expected_rows > args->max_rows) {
    return BadValue("args->expected_rows", args->expected_rows,
                    absl::StrCat("0 to ", args->max_rows));
  }
  const int64_t rows = experts * args->max_rows;
  ExpertsCall call;
  call.device = stack->device.get();
  call.on_gpu = IsOnGpu(*stack);
  call.mask = {args->counts, args->max_rows};
  call.sort.experts = experts;
  call.sort.choices = rows;
  AWQD_ASSIGN_OR_RETURN(const DType x, ToFloating("args->x_dtype", args->x_dtype));
  AWQD_ASSIGN_OR_RETURN(const DType y, ToFloating("args->y_dtype", args->y_dtype));
  GroupedArgs product = {.x = {args->x, x, rows, stack->shape().k},
                         .y = {args->y, y, rows, stack->shape().n},
                         .mask = call.mask,
                         .expected = args->expected_rows};
  AWQD_ASSIGN_OR_RETURN(product.activation, ToSingleActivation(args->activation));
  AWQD_ASSIGN_OR_RETURN(product.quantization, ToRowQuantization(args->quantization));
  Room room(data);
  AWQD_RETURN_IF_ERROR(AddProduct({stack}, product, &room, &call));
  TakeWorkspace(&room, &call);
  return call;
}

absl::Status CheckStackOfMlp(absl::string_view name, const awqd_stack* stack,
                             const awqd_stack& gate, int64_t k, int64_t n) {
  AWQD_RETURN_IF_ERROR(CheckPointer(name, stack));
  if (stack->device != gate.device) {
    return BadValue(name, absl::StrCat("a stack on ", stack->device->info().id),
                    "one of the same awqd_device as args->gate");
  }
  if (stack->experts.size() != gate.experts.size()) {
    return BadValue(name, absl::StrCat(stack->experts.size(), " experts"),
                    absl::StrCat(gate.experts.size(), ", as args->gate"));
  }
  if (stack->shape().k == k && (n == 0 || stack->shape().n == n)) return absl::OkStatus();
  return BadValue(name, ShapeText(stack->shape()),
                  n == 0 ? absl::StrCat("[", k, ", N]") : absl::StrCat("[", k, ", ", n, "]"));
}

// As GatedMlpWork of the server has it. The room is that of FP32 between products for any number of
// rows, so that it grows with them.
absl::StatusOr<ExpertsCall> ReadGroupedMlp(const awqd_grouped_mlp_args* args, void* data) {
  AWQD_RETURN_IF_ERROR(CheckStructure("args", args));
  AWQD_RETURN_IF_ERROR(CheckPointer("args->gate", args->gate));
  const awqd_stack &gate = *args->gate, *const up = args->up, *const down = args->down;
  const int64_t k = gate.shape().k, middle = gate.shape().n;
  AWQD_RETURN_IF_ERROR(CheckStackOfMlp("args->up", up, gate, k, middle));
  AWQD_RETURN_IF_ERROR(CheckStackOfMlp("args->down", down, gate, middle, 0));
  ExpertsCall call;
  Room room(data);
  AWQD_RETURN_IF_ERROR(ReadChoices(*args, gate, *down, &room, &call));
  AWQD_ASSIGN_OR_RETURN(const DType x, ToFloating("args->x_dtype", args->x_dtype));
  AWQD_ASSIGN_OR_RETURN(const ActivationQuantization how, ToRowQuantization(args->quantization));
  const bool rounds = how != ActivationQuantization::kNone;
  // Their rows read rounded numbers in the type of x, of which FP16 may not hold the middle.
  const auto is_vector = [](const awqd_stack& stack) {
    return stack.shape().scheme.code == CodeKind::kVector;
  };
  const bool in_fp32 = rounds && (is_vector(gate) || is_vector(*up) || is_vector(*down));
  const int64_t rows = call.sort.choices;
  const bool one_kernel = call.on_gpu && IsGroupable(*up->experts[0], *gate.experts[0]);
  const bool half = call.on_gpu && middle % 8 == 0;
  const bool narrow = one_kernel && half && !in_fp32 && rows >= kNarrowRows && SizeOf(x) == 2 &&
                      !call.device->info().batch_invariant && !gate.has_bias && !up->has_bias &&
                      !down->has_bias;
  const DType between = narrow ? x : DType::kFp32;
  const DType sums = narrow ? call.combine.y_dtype : DType::kFp32;
  call.combine.in_dtype = sums;

  void* const both = room.TakeBytes(2 * rows * middle * 4);
  auto* const factors = room.TakeArray<float>(rows);
  if (narrow && !rounds && x == DType::kFp16) call.gather.factors = factors;
  const int64_t bytes = rows * middle * SizeOf(between);
  GroupedArgs first = {.x = call.x(x, k),
                       .y = {both, between, one_kernel ? 2 * rows : rows, middle},
                       .x_scale = call.gather.factors,
                       .quantization = how,
                       .sums_factor = narrow && rounds ? NarrowFactor(x) : 1};
  if (one_kernel) {
    AWQD_RETURN_IF_ERROR(AddProduct({&gate, up}, first, &room, &call));
  } else {
    AWQD_RETURN_IF_ERROR(AddProduct({&gate}, first, &room, &call));
    first.y.data = AtOffset(both, bytes);
    AWQD_RETURN_IF_ERROR(AddProduct({up}, first, &room, &call));
  }

  AWQD_ASSIGN_OR_RETURN(call.gate, ReadGate(*args));
  call.gate.gate = both;
  call.gate.up = AtOffset(both, bytes);
  call.gate.count = rows * middle;
  call.gate.dtype = between;
  call.gate.sums_factor = NarrowFactor(sums);
  GroupedArgs last = {.x = {both, DType::kFp32, rows, middle},
                      .y = {const_cast<void*>(call.combine.in), sums, rows, call.combine.cols},
                      .quantization = how};
  if (half && rounds) {
    call.gate_in_prologue = true;
    call.gate.cols = middle;
    last.x.dtype = between;
    last.sums_factor = NarrowFactor(sums);
  } else if (half) {
    call.gate.half = room.TakeArray<uint16_t>(rows * middle);
    call.gate.half_scale = room.TakeArray<float>(rows);
    call.gate.cols = middle;
    last.x = {call.gate.half, DType::kFp16, rows, middle};
    last.x_scale = call.gate.half_scale;
  }
  AWQD_RETURN_IF_ERROR(AddProduct({down}, last, &room, &call));
  TakeWorkspace(&room, &call);
  return call;
}

absl::Status CheckIds(const SortArgs& args) {
  for (int64_t i = 0; i < args.choices; ++i) {
    if (args.ids[i] >= 0 && args.ids[i] < args.experts) continue;
    return BadValue(absl::StrCat("args->expert_ids[", i, "]"), args.ids[i],
                    absl::StrCat("0 to ", args.experts - 1));
  }
  return absl::OkStatus();
}

absl::Status CheckCounts(const RowMask& mask, int64_t experts) {
  for (int64_t e = 0; e < experts; ++e) {
    if (mask.counts[e] == mask.CountOf(e)) continue;
    return BadValue(absl::StrCat("args->counts[", e, "]"), mask.counts[e],
                    absl::StrCat("0 to ", mask.max_rows));
  }
  return absl::OkStatus();
}

// On a CPU, where the numbers of rows can be read.
absl::Status MultiplyOneByOne(const StackProduct& product, const ExpertsCall& call) {
  const GroupedArgs& all = product.args;
  const int64_t x_row = all.x.cols * SizeOf(all.x.dtype), y_row = all.y.cols * SizeOf(all.y.dtype);
  const bool masked = call.mask.max_rows > 0;
  int64_t end = 0;
  for (int64_t e = 0; e < call.sort.experts; ++e) {
    const int64_t begin = masked ? e * call.mask.max_rows : end;
    end = masked ? begin + call.mask.counts[e] : call.sort.ends[e];
    const int64_t rows = end - begin;
    if (rows == 0) continue;
    const DeviceWeight& weight = *product.stacks[0]->experts[e];
    const Path path = ChoosePath(weight, rows, all.quantization);
    const MatmulArgs args = {
        .weight = &weight,
        .x = {static_cast<const char*>(all.x.data) + begin * x_row, all.x.dtype, rows, all.x.cols},
        .y = {static_cast<char*>(all.y.data) + begin * y_row, all.y.dtype, rows, all.y.cols},
        .bias = weight.bias(),
        .workspace = call.workspace,
        .activation = all.activation,
        .quantization = all.quantization};
    AWQD_RETURN_IF_ERROR(QuantizedMatmul(args, path, {}));
  }
  return absl::OkStatus();
}

absl::Status MultiplyStack(const StackProduct& product, const ExpertsCall& call,
                           StreamView stream) {
  if (!call.on_gpu) return MultiplyOneByOne(product, call);
  GroupedArgs args = product.Whole();
  args.workspace = call.workspace;
  if (call.gate_in_prologue && &product == &call.products.back()) args.gate = &call.gate;
  return GroupedMatmul(args, *product.row, stream);
}

absl::Status MakeTable(const StackProduct& product, const ExpertsCall& call, StreamView stream) {
  const GroupedArgs whole = product.Whole();
  GroupedTableArgs args = {.product = &whole,
                           .tile = product.row->grouped_tile(whole),
                           .ends = call.sort.ends,
                           .table = product.table};
  for (size_t i = 0; i < product.stacks.size(); ++i) {
    args.parts[i] = static_cast<const ExpertParts*>(product.stacks[i]->parts.data());
  }
  return MakeGroupedTable(args, *call.device, stream);
}

absl::Status RunExperts(const ExpertsCall& call, StreamView stream) {
  if (!call.on_gpu) AWQD_RETURN_IF_ERROR(CheckIds(call.sort));
  AWQD_RETURN_IF_ERROR(SortChoices(call.sort, *call.device, stream));
  // Rows are gathered after this, as products that begin early need it (SortArgs).
  for (const StackProduct& product : call.products) {
    if (call.on_gpu) AWQD_RETURN_IF_ERROR(MakeTable(product, call, stream));
  }
  AWQD_RETURN_IF_ERROR(GatherRows(call.gather, *call.device, stream));
  for (const StackProduct& product : call.products) {
    if (&product == &call.products.back() && !call.gate_in_prologue) {
      AWQD_RETURN_IF_ERROR(MultiplyByUp(call.gate, *call.device, stream));
    }
    AWQD_RETURN_IF_ERROR(MultiplyStack(product, call, stream));
  }
  return CombineRows(call.combine, *call.device, stream);
}

absl::Status RunMasked(const ExpertsCall& call, StreamView stream) {
  if (call.on_gpu) {
    AWQD_RETURN_IF_ERROR(MakeTable(call.products[0], call, stream));
  } else {
    AWQD_RETURN_IF_ERROR(CheckCounts(call.mask, call.sort.experts));
  }
  return MultiplyStack(call.products[0], call, stream);
}

absl::Status CheckAndRun(const absl::StatusOr<ExpertsCall>& call, const awqd_workspace& workspace,
                         void* stream) {
  AWQD_RETURN_IF_ERROR(call.status());
  AWQD_ASSIGN_OR_RETURN(const StreamView view,
                        Begin(*call->device, workspace, call->bytes, stream));
  if (call->sort.choices == 0) return absl::OkStatus();
  if (call->mask.max_rows > 0) {
    const GroupedArgs& product = call->products[0].args;
    AWQD_RETURN_IF_ERROR(CheckPointer("args->x", product.x.data));
    AWQD_RETURN_IF_ERROR(CheckPointer("args->y", product.y.data));
    AWQD_RETURN_IF_ERROR(CheckPointer("args->counts", call->mask.counts));
    return RunMasked(*call, view);
  }
  AWQD_RETURN_IF_ERROR(CheckPointer("args->x", call->gather.in));
  AWQD_RETURN_IF_ERROR(CheckPointer("args->y", call->combine.y));
  AWQD_RETURN_IF_ERROR(CheckPointer("args->expert_ids", call->sort.ids));
  return RunExperts(*call, view);
}

// Where the parts of a workspace are, which may be too small, or none.
void* PartsOf(const awqd_stack* stack, const awqd_workspace& workspace) {
  return stack == nullptr || workspace.data == nullptr ? nullptr
                                                       : Behind(*stack->device, workspace);
}

}  // namespace
}  // namespace awqd::library

using namespace awqd::library;  // NOLINT: the functions below are in no namespace

int awqd_stack_make(const awqd_weight* const* weights, size_t count, awqd_stack** stack) {
  return Call([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(CheckPointer("weights", weights));
    return MakeStack({weights, count}, stack);
  });
}
void awqd_stack_free(awqd_stack* stack) { delete stack; }

int awqd_grouped_matmul_workspace(const awqd_stack* stack, const awqd_grouped_matmul_args* args,
                                  int64_t* bytes) {
  return Call([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(CheckPointer("bytes", bytes));
    AWQD_ASSIGN_OR_RETURN(const ExpertsCall call, ReadGroupedMatmul(stack, args, nullptr));
    *bytes = CounterBytes(*call.device) + call.bytes;
    return absl::OkStatus();
  });
}

int awqd_grouped_matmul(const awqd_stack* stack, const awqd_grouped_matmul_args* args,
                        awqd_workspace workspace, void* stream) {
  return Call([&] {
    return CheckAndRun(ReadGroupedMatmul(stack, args, PartsOf(stack, workspace)), workspace,
                       stream);
  });
}

int awqd_masked_matmul_workspace(const awqd_stack* stack, const awqd_masked_matmul_args* args,
                                 int64_t* bytes) {
  return Call([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(CheckPointer("bytes", bytes));
    AWQD_ASSIGN_OR_RETURN(const ExpertsCall call, ReadMaskedMatmul(stack, args, nullptr));
    *bytes = CounterBytes(*call.device) + call.bytes;
    return absl::OkStatus();
  });
}

int awqd_masked_matmul(const awqd_stack* stack, const awqd_masked_matmul_args* args,
                       awqd_workspace workspace, void* stream) {
  return Call([&] {
    return CheckAndRun(ReadMaskedMatmul(stack, args, PartsOf(stack, workspace)), workspace, stream);
  });
}

int awqd_grouped_mlp_workspace(const awqd_grouped_mlp_args* args, int64_t* bytes) {
  return Call([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(CheckPointer("bytes", bytes));
    AWQD_ASSIGN_OR_RETURN(const ExpertsCall call, ReadGroupedMlp(args, nullptr));
    *bytes = CounterBytes(*call.device) + call.bytes;
    return absl::OkStatus();
  });
}

int awqd_grouped_mlp(const awqd_grouped_mlp_args* args, awqd_workspace workspace, void* stream) {
  return Call([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(CheckStructure("args", args));
    return CheckAndRun(ReadGroupedMlp(args, PartsOf(args->gate, workspace)), workspace, stream);
  });
}
