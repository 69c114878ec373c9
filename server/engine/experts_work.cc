// One product for each expert that has rows, by one kernel for all experts or one by one; then each
// token's rows are combined. A gated MLP is three products, and the gate between them.
#include "server/engine/experts_work.h"

#include <cmath>
#include <numeric>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/exact.h"
#include "server/engine/lane.h"
#include "server/engine/matmul_work.h"
#include "server/engine/reassembly.h"

namespace awqd::engine {
namespace {

constexpr size_t kSumsSlot = 1;
// Slots of a gated MLP.
constexpr size_t kMiddleSlot = 1, kDownSlot = 2, kHalfSlot = 3, kHalfScaleSlot = 4, kSharedSlot = 7;

// The arguments, and the weights that they point to.
struct Grouped {
  std::vector<const DeviceWeight*> experts;
  GroupedArgs args;

  explicit Grouped(const ExpertProduct& product) {
    for (const model::WeightStack* stack : {product.stack, product.also}) {
      if (stack == nullptr) continue;
      for (const auto& expert : stack->experts) {
        experts.push_back(expert->parts[product.part].weight.get());
      }
    }
    args = {.experts = experts,
            .ends = product.ends,
            .x = product.x,
            .y = product.y,
            .bias = product.bias,
            .x_scale = product.x_scale,
            .activation = product.activation,
            .quantization = product.rounding.how,
            .scales = product.rounding.scales,
            .gather = product.gather,
            .gate = product.gate.has_value() ? &*product.gate : nullptr,
            .sums_factor = product.sums_factor};
  }
  Grouped(const Grouped&) = delete;
  Grouped& operator=(const Grouped&) = delete;

  // Null: they run one by one.
  const KernelRow* FindRow(const ExpertProduct& product) const {
    const bool one = product.stack->experts.size() == 1;
    const bool alike = product.also == nullptr || product.also_rounding == product.rounding;
    return one || !alike || product.path == Path::kDequantize ? nullptr : GroupedRow(args);
  }
};

// Runs the products of one stack expert by expert.
absl::Status RunOneByOne(Lane& lane, const ExpertProduct& product, ExecutionReport* report) {
  const int64_t x_row = product.x.cols * SizeOf(product.x.dtype);
  const int64_t y_row = product.y.cols * SizeOf(product.y.dtype);
  int64_t begin = 0;
  for (size_t e = 0; e < product.ends.size(); begin = product.ends[e++]) {
    const int64_t rows = product.ends[e] - begin;
    if (rows == 0) continue;
    const DeviceWeight& weight = *product.stack->experts[e]->parts[product.part].weight;
    MatmulArgs args;
    args.weight = &weight;
    args.x = {static_cast<const char*>(product.x.data) + begin * x_row, product.x.dtype, rows,
              product.x.cols};
    args.y = {static_cast<char*>(product.y.data) + begin * y_row, product.y.dtype, rows,
              product.y.cols};
    args.bias = product.bias != nullptr ? product.bias + e * product.y.cols : weight.bias();
    args.activation = product.activation;
    args.quantization = product.rounding.how;
    if (product.rounding.scales != nullptr) {
      args.scales = product.rounding.scales + begin * product.rounding.each;
    }
    const Path path = product.path.value_or(ChoosePath(lane, weight, rows, args.quantization));
    AWQD_RETURN_IF_ERROR(RunProduct(lane, args, path, report));
  }
  return absl::OkStatus();
}

// Copies some columns of some rows of a bias [.., n], if there is one.
std::vector<float> CopyBias(const std::vector<float>& bias, int64_t n,
                            absl::Span<const int64_t> rows, model::ColumnSpan columns) {
  std::vector<float> out;
  if (bias.empty()) return out;
  for (int64_t row : rows) {
    const auto begin = bias.begin() + row * n;
    out.insert(out.end(), begin + columns.begin, begin + columns.end);
  }
  return out;
}

std::vector<int64_t> NumbersBelow(int64_t end) {
  std::vector<int64_t> out(end);
  std::iota(out.begin(), out.end(), 0);
  return out;
}

// The numbers of the experts of a shard.
std::vector<int64_t> ExpertsOf(const model::WeightStack& stack, size_t shard) {
  std::vector<int64_t> out;
  for (size_t e = 0; e < stack.places.size(); ++e) {
    if (stack.places[e].shard == shard) out.push_back(static_cast<int64_t>(e));
  }
  return out;
}

// The same of the scales of experts.
Rounding CopyRounding(const Rounding& rounding, absl::Span<const int64_t> experts) {
  Rounding out = rounding;
  if (rounding.scales.size() > 1) out.scales = CopyBias(rounding.scales, 1, experts, {0, 1});
  return out;
}

// Gives each row of an expert the expert's scale. `own`: the scales of each row instead, or none.
absl::StatusOr<RowRounding> UploadRounding(Lane& lane, const Rounding& rounding,
                                           absl::Span<const int64_t> ends,
                                           absl::Span<const float> own, UploadedLists* lists) {
  if (!own.empty()) {
    AWQD_ASSIGN_OR_RETURN(const float* const there, lane.Upload(own));
    return RowRounding{rounding.how, there, static_cast<int64_t>(own.size()) / ends.back()};
  }
  const std::vector<float>& scales = rounding.scales;
  if (!HasGivenScales(rounding.how)) return RowRounding{rounding.how};
  std::vector<float>& of_rows = lists->emplace_back();
  for (size_t e = 0; e < ends.size(); ++e) {
    of_rows.resize(ends[e], scales.size() == 1 ? scales[0] : scales[e]);
  }
  AWQD_ASSIGN_OR_RETURN(const float* const there, lane.Upload(of_rows));
  return RowRounding{rounding.how, there};
}

// Runs all products with one kernel.
absl::Status RunGrouped(Lane& lane, GroupedArgs args, const KernelRow& row,
                        ExecutionReport* report) {
  const std::string table = row.grouped_table(args);
  AWQD_ASSIGN_OR_RETURN(args.table, lane.Upload(table.data(), static_cast<int64_t>(table.size())));
  AWQD_ASSIGN_OR_RETURN(args.workspace, lane.AllocateWorkspace(GroupedWorkspaceBytes(args, row)));
  AWQD_RETURN_IF_ERROR(GroupedMatmul(args, row, lane.stream()));
  AddKernel(&row, report);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<WorkPartition> GroupedMatmulWork::Partition(StagingPool& staging) const {
  const model::PlacedWeight& weight = *stack->experts.front();
  const int64_t n = weight.shape.n;
  if (stack->expert_parallel()) {
    return PartitionExperts(*stack, staging, [&](size_t shard) {
      auto out = std::make_unique<GroupedMatmulWork>(*this);
      out->stack = stack->shards[shard];
      out->bias = CopyBias(bias, n, ExpertsOf(*stack, shard), {0, n});
      out->rounding = CopyRounding(rounding, ExpertsOf(*stack, shard));
      return out;
    });
  }
  if (weight.partitioned_at_rows()) {
    return PartitionAtRows({.count = y_rows(),
                            .cols = n,
                            .terms = summed ? top_k : 1,
                            .weights = router_weights,
                            .activation = activation,
                            .y_dtype = out_dtype},
                           staging);
  }
  const std::vector<int64_t> all = NumbersBelow(experts());
  return PartitionColumns({weight, {0, n}, y_rows(), SizeOf(out_dtype)},
                          [&](size_t, model::ColumnSpan columns) {
                            auto out = std::make_unique<GroupedMatmulWork>(*this);
                            out->bias = CopyBias(bias, n, all, columns);
                            return out;
                          });
}

absl::StatusOr<WorkPartition> GroupedMatmulWork::PartitionAtRows(const Reduction& reduction,
                                                                 StagingPool& staging) const {
  const model::PlacedWeight& weight = *stack->experts.front();
  // All of a token is rounded by one scale, as on one device; parts begin with a block of 128.
  GroupedMatmulWork like = *this;
  if (rounding.how == ActivationQuantization::kFloat8PerToken) {
    like.rounding.how = ActivationQuantization::kFloat8Static;
    like.token_scales = ComputeTokenScales({x, x_dtype, rows}, 448);
  }
  const auto make = [&](size_t i) -> absl::StatusOr<std::unique_ptr<Work>> {
    auto part = std::make_unique<GroupedMatmulWork>(like);
    AWQD_ASSIGN_OR_RETURN(part->x, CopyColumns({x, x_dtype, rows}, weight.parts[i], staging));
    if (x_dtype == DType::kE4m3 && rounding.how == ActivationQuantization::kFloat8PerBlock) {
      part->token_scales = CopyBlockScales(token_scales, rows, weight, weight.parts[i]);
    }
    part->out_dtype = DType::kFp32;
    part->summed = false;
    part->router_weights.clear();
    part->activation = ActivationFunction::kNone;
    if (i > 0) part->bias.clear();  // the weights' own is with the first part too
    return part;
  };
  return PartitionPartialSums(reduction, weight.parts.size(), make);
}

absl::Status GroupedMatmulWork::Compute(Lane& lane, const RoutedTokens& routed, char* y,
                                        ExecutionReport* report) const {
  const int64_t n = last().n;
  AWQD_ASSIGN_OR_RETURN(void* sums, lane.AllocateScratch(kSumsSlot, routed.x.rows * n * 4));
  ExpertProduct product = {.stack = stack.get(),
                           .part = part,
                           .x = routed.x,
                           .y = {sums, DType::kFp32, routed.x.rows, n},
                           .ends = routed.ends,
                           .activation = activation,
                           .path = path};
  if (!bias.empty()) {
    AWQD_ASSIGN_OR_RETURN(product.bias, lane.Upload(bias));
  }
  UploadedLists lists;
  AWQD_ASSIGN_OR_RETURN(product.rounding,
                        UploadRounding(lane, rounding, routed.ends, routed.scales, &lists));
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  return CombineAndFetch(lane, routed, product.y, nullptr, y);
}

bool IsOneKernel(const ExpertProduct& product) {
  return Grouped(product).FindRow(product) != nullptr;
}

absl::Status RunExperts(Lane& lane, const ExpertProduct& product, ExecutionReport* report) {
  const Grouped grouped(product);
  if (const KernelRow* const row = grouped.FindRow(product)) {
    return RunGrouped(lane, grouped.args, *row, report);
  }
  if (product.also == nullptr) return RunOneByOne(lane, product, report);
  ExpertProduct alone = product;
  alone.also = nullptr;
  alone.y.rows = product.x.rows;
  AWQD_RETURN_IF_ERROR(RunExperts(lane, alone, report));
  alone.stack = product.also;
  alone.rounding = product.also_rounding;
  if (alone.bias != nullptr) alone.bias += static_cast<int64_t>(product.ends.size()) * alone.y.cols;
  alone.y.data = static_cast<char*>(product.y.data) +
                 product.x.rows * product.y.cols * SizeOf(product.y.dtype);
  return RunExperts(lane, alone, report);
}

// --- A gated MLP ---

bool GatedMlpWork::partitioned() const {
  return Work::partitioned() || mlp_.gate->expert_parallel() || mlp_.up->expert_parallel() ||
         mlp_.down->expert_parallel();
}

batching::BatchKey GatedMlpWork::merge_key() const {
  const Rounding* const roundings[] = {&mlp_.of_gate,    &mlp_.of_up,    &mlp_.of_down,
                                       &shared_.of_gate, &shared_.of_up, &shared_.of_down};
  const bool own = absl::c_any_of(roundings, [](const auto* each) { return each->from_request; });
  if (own || !gate_up_bias.empty() || !down_bias.empty()) return {};
  batching::BatchKey out = {
      .subject = &Here(*mlp_.gate),
      .variant = variant(roundings) | uint64_t{ends_in_middle_} << 27,
      .constants = {parameters.limit, parameters.alpha, parameters.beta, parameters.linear_beta}};
  for (size_t i = 1; i < first_experts_.size(); ++i) {
    out.further[i - 1] = first_experts_[i]->parts[part].weight.get();
  }
  return out;
}

int64_t GatedMlpWork::cost() const {
  double cost = static_cast<double>(tokens()) * RowCost(mlp_);
  if (shared_.gate != nullptr) cost += static_cast<double>(rows) * RowCost(shared_);
  return CostOfMultiplications(cost);
}

// Every device that has columns of gate has them of up, and the same rows of down.
absl::Status GatedMlpWork::CheckPartitionedAlike(size_t begin) const {
  const auto &gate = first_experts_[begin], &up = first_experts_[begin + 1],
             &down = first_experts_[begin + 2];
  const auto borders = [](const model::PlacedWeight& weight, bool rows) {
    return absl::StrJoin(weight.parts, ", ", [rows](std::string* out, const auto& part) {
      absl::StrAppend(out, part.weight->device->info().id, rows ? " rows [" : " columns [",
                      rows ? part.row_begin : part.col_begin, ", ",
                      rows ? part.row_end() : part.col_end(), ")");
    });
  };
  if (!down->partitioned_at_rows()) {
    return absl::UnimplementedError(absl::StrCat(
        name(), ": got a down projection on ", borders(*down, false),
        ", expected one that is cut at the rows where gate is cut at columns: it has an order, a "
        "factor, a transform or groups that 128 is no multiple of, or its path does not end in the "
        "name of a down projection; serve with --shard=replicas, --shard=models or "
        "--shard=experts"));
  }
  const auto alike = [&down = *down](const model::PlacedWeight& weight) {
    return absl::c_equal(weight.parts, down.parts, [](const auto& columns, const auto& rows) {
      return columns.weight->device == rows.weight->device && columns.col_begin == rows.row_begin &&
             columns.col_end() == rows.row_end();
    });
  };
  for (const auto* const weight : {gate.get(), up.get()}) {
    if (alike(*weight)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        name(), ": got ", weight == gate.get() ? "gate" : "up", " on ", borders(*weight, false),
        ", expected it as down is, on ", borders(*down, true)));
  }
  return absl::OkStatus();
}

absl::Status GatedMlpWork::CheckSharedPartitioned() const {
  AWQD_RETURN_IF_ERROR(CheckPartitionedAlike(3));
  const std::string got = first_experts_[3]->devices(), expected = first_experts_[0]->devices();
  if (got == expected) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      name(), ": got a shared expert on ", got, ", expected it on ", expected, ", as the experts"));
}

absl::StatusOr<WorkPartition> GatedMlpWork::Partition(StagingPool& staging) const {
  if (mlp_.gate->expert_parallel()) {
    const auto alike = [&](const model::WeightStack& stack) {
      return stack.devices() == mlp_.gate->devices() && stack.places == mlp_.gate->places;
    };
    if (!alike(*mlp_.up) || !alike(*mlp_.down)) {
      return absl::FailedPreconditionError(absl::StrCat(
          name(), ": got gate on ", mlp_.gate->devices(), ", up on ", mlp_.up->devices(),
          " and down on ", mlp_.down->devices(), ", expected each expert's on one device"));
    }
    const auto make = [&](size_t shard) {
      const std::vector<int64_t> mine = ExpertsOf(*mlp_.gate, shard);
      auto out = std::make_unique<GatedMlpWork>(
          Stacks{mlp_.gate->shards[shard], mlp_.up->shards[shard], mlp_.down->shards[shard],
                 CopyRounding(mlp_.of_gate, mine), CopyRounding(mlp_.of_up, mine),
                 CopyRounding(mlp_.of_down, mine)},
          Stacks());
      static_cast<RoutedWork&>(*out) = *this;
      out->parameters = parameters;
      std::vector<int64_t> both = mine;
      for (int64_t expert : mine) both.push_back(experts() + expert);
      const int64_t middle = mlp_.gate->shape().n, n = mlp_.down->shape().n;
      out->gate_up_bias = CopyBias(gate_up_bias, middle, both, {0, middle});
      out->down_bias = CopyBias(down_bias, n, mine, {0, n});
      out->shared_expert_gate.clear();
      return out;
    };
    return PartitionExperts(*mlp_.gate, staging, make, MakeSharedPart());
  }
  AWQD_RETURN_IF_ERROR(CheckPartitionedAlike(0));
  if (shared_.gate != nullptr) AWQD_RETURN_IF_ERROR(CheckSharedPartitioned());
  const auto by_token = [](const Stacks& stacks) {
    return stacks.of_down.how == ActivationQuantization::kFloat8PerToken;
  };
  if (by_token(mlp_) || by_token(shared_)) return PartitionInStages(staging);
  const Reduction reduction = {
      .count = y_rows(), .cols = mlp_.down->shape().n, .y_dtype = out_dtype};
  const auto make = [&](size_t i) -> absl::StatusOr<std::unique_ptr<Work>> {
    const model::WeightPart& columns = first_experts_[0]->parts[i];
    std::unique_ptr<GatedMlpWork> part = MakeColumns({columns.col_begin, columns.col_end()});
    if (i > 0) part->down_bias.clear();  // the weights' own is with the first part too
    return part;
  };
  return PartitionPartialSums(reduction, first_experts_[0]->parts.size(), make);
}

std::unique_ptr<GatedMlpWork> GatedMlpWork::MakeColumns(model::ColumnSpan columns) const {
  auto out = std::make_unique<GatedMlpWork>(*this);
  out->out_dtype = DType::kFp32;
  out->gate_up_bias =
      CopyBias(gate_up_bias, mlp_.gate->shape().n, NumbersBelow(2 * experts()), columns);
  return out;
}

absl::StatusOr<WorkPartition> GatedMlpWork::PartitionInStages(StagingPool& staging) const {
  const auto whole = std::make_shared<GatedMlpWork>(*this);
  const auto run_experts = [whole, weights = ComputeSharedWeights(),
                            &staging](Payload added) -> absl::StatusOr<WorkPartition> {
    WorkPartition out = whole->PartitionMiddle();
    whole->FreeInputs();  // the parts have it
    const Reduction reduction = {.count = whole->y_rows(),
                                 .cols = whole->last().n,
                                 .terms = whole->summed ? whole->top_k : 1,
                                 .weights = whole->router_weights,
                                 .y_dtype = whole->out_dtype,
                                 .added = std::move(added),
                                 .added_weights = weights};
    out.next = [whole, reduction, &staging](Payload middle) {
      return whole->PartitionDown(reduction, std::move(middle), staging);
    };
    return out;
  };
  if (shared_.gate == nullptr) return run_experts(Payload());
  const std::shared_ptr<GatedMlpWork> shared = MakeSharedPart();
  WorkPartition out = shared->PartitionMiddle();
  shared->FreeInputs();
  out.next = [shared, run_experts, &staging](Payload middle) -> absl::StatusOr<WorkPartition> {
    const Reduction sums = {
        .count = shared->rows, .cols = shared->last().n, .y_dtype = DType::kFp32};
    AWQD_ASSIGN_OR_RETURN(WorkPartition down,
                          shared->PartitionDown(sums, std::move(middle), staging));
    down.next = run_experts;
    return down;
  };
  return out;
}

WorkPartition GatedMlpWork::PartitionMiddle() const {
  const model::PlacedWeight& gate = *first_experts_[0];
  const ColumnResult result = {gate, {0, gate.shape.n}, choices(), SizeOf(DType::kFp32)};
  return PartitionColumns(result, [&](size_t, model::ColumnSpan columns) {
    std::unique_ptr<GatedMlpWork> part = MakeColumns(columns);
    part->shared_ = {};
    part->first_experts_.resize(3);
    part->summed = false;
    part->router_weights.clear();
    part->shared_expert_gate.clear();
    part->ends_in_middle_ = true;
    return part;
  });
}

absl::StatusOr<WorkPartition> GatedMlpWork::PartitionDown(const Reduction& reduction,
                                                          Payload middle,
                                                          StagingPool& staging) const {
  GroupedMatmulWork down;
  static_cast<RoutedWork&>(down) = *this;
  down.stack = mlp_.down;
  down.bias = down_bias;
  down.rounding = mlp_.of_down;
  down.x = std::move(middle);
  down.x_dtype = DType::kFp32;
  down.token_scales.clear();
  down.rows = choices();
  down.top_k = 1;
  down.shared_expert_gate.clear();
  down.activation = ActivationFunction::kNone;
  return down.PartitionAtRows(reduction, staging);
}

std::vector<float> GatedMlpWork::ComputeSharedWeights() const {
  const int64_t k = first().k, each = scales_each();
  std::vector<float> out;
  for (int64_t token = 0; token < (shared_expert_gate.empty() ? 0 : rows); ++token) {
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      float value = LoadElement(x.data(), x_dtype, token * k + i);
      if (each > 0) value *= token_scales[token * each + (each == 1 ? 0 : i / kScaledBlock)];
      sum += double{value} * shared_expert_gate[i];
    }
    out.push_back(1 / (1 + std::exp(-static_cast<float>(sum))));
  }
  return out;
}

std::unique_ptr<GatedMlpWork> GatedMlpWork::MakeSharedPart() const {
  if (shared_.gate == nullptr) return nullptr;
  auto out = std::make_unique<GatedMlpWork>(shared_, Stacks());
  static_cast<RoutedWork&>(*out) = *this;
  out->parameters = parameters;
  out->out_dtype = DType::kFp32;
  out->of_experts = out->summed = false;
  out->top_k = 1;
  out->ids.clear();
  out->router_weights.clear();
  // One of the devices that have it; requests differ in their first choice.
  out->part = (ids.empty() ? 0 : ids[0]) % first_experts_[3]->parts.size();
  return out;
}

absl::Status GatedMlpWork::RunGateAndUp(Lane& lane, const Stacks& stacks,
                                        absl::Span<const float> scales, DType dtype,
                                        ExpertProduct* product, UploadedLists* lists,
                                        ExecutionReport* report) const {
  const int64_t middle = Here(*stacks.gate).shape.n, both_rows = 2 * product->rows();
  product->stack = stacks.gate.get();
  product->also = stacks.up.get();
  AWQD_ASSIGN_OR_RETURN(product->rounding,
                        UploadRounding(lane, stacks.of_gate, product->ends, scales, lists));
  product->also_rounding = product->rounding;
  if (stacks.of_up != stacks.of_gate) {
    AWQD_ASSIGN_OR_RETURN(product->also_rounding,
                          UploadRounding(lane, stacks.of_up, product->ends, {}, lists));
  }
  product->y = {nullptr, dtype, both_rows, middle};
  const int64_t bytes = both_rows * middle * SizeOf(dtype);
  AWQD_ASSIGN_OR_RETURN(product->y.data, lane.AllocateScratch(kMiddleSlot, bytes));
  return RunExperts(lane, *product, report);
}

absl::Status GatedMlpWork::RunToDown(Lane& lane, const Stacks& stacks,
                                     absl::Span<const float> scales, DType dtype, float sums_factor,
                                     ExpertProduct* product, UploadedLists* lists,
                                     ExecutionReport* report) const {
  AWQD_RETURN_IF_ERROR(RunGateAndUp(lane, stacks, scales, dtype, product, lists, report));
  product->stack = stacks.down.get();
  product->also = nullptr;
  product->bias = nullptr;
  product->gather = nullptr;
  AWQD_ASSIGN_OR_RETURN(product->rounding,
                        UploadRounding(lane, stacks.of_down, product->ends, {}, lists));
  return MultiplyGate(lane, product->y, sums_factor, product);
}

absl::StatusOr<const float*> GatedMlpWork::RunShared(Lane& lane, const RoutedTokens& routed,
                                                     UploadedLists* lists,
                                                     ExecutionReport* report) const {
  const ConstMatrixView& tokens = routed.tokens;
  const int64_t ends[] = {tokens.rows};
  ExpertProduct product = {.part = part, .x = tokens, .ends = ends, .path = path};
  AWQD_RETURN_IF_ERROR(
      RunToDown(lane, shared_, routed.scales_of_tokens, DType::kFp32, 1, &product, lists, report));
  const int64_t n = last().n;
  AWQD_ASSIGN_OR_RETURN(void* sums, lane.AllocateScratch(kSharedSlot, tokens.rows * n * 4));
  product.y = {sums, DType::kFp32, tokens.rows, n};
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  return static_cast<const float*>(sums);
}

absl::Status GatedMlpWork::Compute(Lane& lane, const RoutedTokens& routed, char* y,
                                   ExecutionReport* report) const {
  const int64_t rows = routed.x.rows, n = last().n;
  // The shared expert comes first, because the experts use the same buffers.
  const float* shared = nullptr;
  UploadedLists lists;
  if (shared_.gate != nullptr) {
    AWQD_ASSIGN_OR_RETURN(shared, RunShared(lane, routed, &lists, report));
  }
  ExpertProduct product = {.part = part, .x = routed.x, .ends = routed.ends, .path = path};
  if (!gate_up_bias.empty()) {
    AWQD_ASSIGN_OR_RETURN(product.bias, lane.Upload(gate_up_bias));
  }
  if (ends_in_middle_) {
    AWQD_RETURN_IF_ERROR(
        RunGateAndUp(lane, mlp_, routed.scales, DType::kFp32, &product, &lists, report));
    const MatrixView middle = {product.y.data, DType::kFp32, rows, n};
    AWQD_RETURN_IF_ERROR(MultiplyByUp(GateOf(product.y), step_device(), lane.stream()));
    return CombineAndFetch(lane, routed, middle, nullptr, y);
  }
  const bool narrow = Narrows(routed, product);
  if (routed.x.data == nullptr) product.x = routed.tokens, product.gather = routed.sources;
  if (narrow && product.gather != nullptr) product.sums_factor = NarrowFactor(x_dtype);
  if (narrow && product.gather == nullptr) product.x_scale = routed.factors;
  const DType sums_dtype = narrow ? out_dtype : DType::kFp32;
  AWQD_RETURN_IF_ERROR(RunToDown(lane, mlp_, routed.scales, narrow ? x_dtype : DType::kFp32,
                                 NarrowFactor(sums_dtype), &product, &lists, report));
  if (!down_bias.empty()) {
    AWQD_ASSIGN_OR_RETURN(product.bias, lane.Upload(down_bias));
  }
  RoutedTokens combined = routed;
  if (!of_experts) combined.weights = routed.shared_weights;  // of MakeSharedPart
  if (combined.rows != nullptr || combined.weights != nullptr) {
    const int64_t bytes = rows * n * SizeOf(sums_dtype);
    AWQD_ASSIGN_OR_RETURN(void* sums, lane.AllocateScratch(kDownSlot, bytes));
    product.y = {sums, sums_dtype, rows, n};
    AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
    return CombineAndFetch(lane, combined, product.y, shared, y);
  }
  const int64_t y_bytes = rows * n * SizeOf(out_dtype);
  AWQD_ASSIGN_OR_RETURN(void* target, lane.AllocateResult(y, y_bytes));
  product.y = {target, out_dtype, rows, n};
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  return lane.Fetch(y, target, y_bytes);
}

bool GatedMlpWork::MayNarrow(int64_t rows) const {
  const Device& device = step_device();
  if (device.host_addressable() || device.info().batch_invariant) return false;
  if (!of_experts || rows < kNarrowRows || SizeOf(x_dtype) != 2) return false;
  const bool rounds = mlp_.of_gate.how != ActivationQuantization::kNone;
  if (rounds != (mlp_.of_down.how != ActivationQuantization::kNone)) return false;
  // The factor of narrow rows is one of sums before the bias.
  if (!gate_up_bias.empty() || !down_bias.empty()) return false;
  for (const auto* stack : {mlp_.gate.get(), mlp_.up.get(), mlp_.down.get()}) {
    if (Here(*stack).bias() != nullptr) return false;
    // Its rows read rounded numbers in the type of x, of which FP16 may not hold the middle.
    if (rounds && Here(*stack).shape.scheme.code == CodeKind::kVector) return false;
  }
  return true;
}

bool GatedMlpWork::GathersTokens(const RoutedTokens& routed) const {
  if (ends_in_middle_ || step_device().host_addressable() || mlp_.of_gate != mlp_.of_up)
    return false;
  return mlp_.of_gate.how != ActivationQuantization::kNone &&
         IsOneKernel({.stack = mlp_.gate.get(),
                      .also = mlp_.up.get(),
                      .part = part,
                      .x = routed.x,
                      .rounding = {mlp_.of_gate.how},
                      .also_rounding = {mlp_.of_gate.how},
                      .ends = routed.ends,
                      .path = path});
}

bool GatedMlpWork::Narrows(const RoutedTokens& routed, ExpertProduct product) const {
  if (!MayNarrow(routed.x.rows)) return false;
  product.stack = mlp_.gate.get();
  product.also = mlp_.up.get();
  product.rounding.how = product.also_rounding.how = mlp_.of_gate.how;
  product.y = {nullptr, DType::kFp32, 2 * routed.x.rows, first().n};
  if (mlp_.of_gate != mlp_.of_up || !IsOneKernel(product)) return false;
  product.rounding.how = mlp_.of_down.how;
  product.stack = mlp_.down.get();
  product.also = nullptr;
  product.x = {nullptr, DType::kFp16, routed.x.rows, first().n};
  return first().n % 8 == 0 && IsOneKernel(product);
}

GateArgs GatedMlpWork::GateOf(const MatrixView& both) const {
  const int64_t count = both.rows / 2 * both.cols;
  return {.gate = both.data,
          .up = static_cast<char*>(both.data) + count * SizeOf(both.dtype),
          .count = count,
          .activation = activation,
          .parameters = parameters,
          .dtype = both.dtype};
}

absl::Status GatedMlpWork::MultiplyGate(Lane& lane, const MatrixView& both, float sums_factor,
                                        ExpertProduct* down) const {
  const int64_t middle = both.cols, rows = both.rows / 2;
  GateArgs args = GateOf(both);
  args.sums_factor = sums_factor;
  down->sums_factor = 1;
  down->x = {nullptr, DType::kFp16, rows, middle};
  // One kernel for all experts reads FP16 with a scale for each row, and its prologue rounds the
  // middle as it computes it. Else the prologue converts FP32.
  const bool one_kernel = middle % 8 == 0 && IsOneKernel(*down);
  if (one_kernel && down->rounding.how != ActivationQuantization::kNone &&
      !step_device().host_addressable()) {
    args.cols = middle;
    down->x = {both.data, both.dtype, rows, middle};
    down->x_scale = nullptr;
    down->sums_factor = sums_factor;
    down->gate = args;
    return absl::OkStatus();
  }
  if (one_kernel && down->rounding.how == ActivationQuantization::kNone) {
    AWQD_ASSIGN_OR_RETURN(void* half, lane.AllocateScratch(kHalfSlot, rows * middle * 2));
    AWQD_ASSIGN_OR_RETURN(void* scale, lane.AllocateScratch(kHalfScaleSlot, rows * 4));
    args.half = static_cast<uint16_t*>(half);
    args.half_scale = static_cast<float*>(scale);
    args.cols = middle;
    down->x.data = half;
    down->x_scale = args.half_scale;
  } else {
    down->x = {both.data, DType::kFp32, rows, middle};
    down->x_scale = nullptr;
  }
  return MultiplyByUp(args, step_device(), lane.stream());
}

}  // namespace awqd::engine
