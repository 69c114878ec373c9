// One product for each expert that has rows, by one kernel for all experts or one by one; then each
// token's rows are combined. A gated MLP is three products, and the gate between them.
#include "server/engine/experts_work.h"

#include <numeric>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"
#include "server/engine/matmul_work.h"
#include "server/engine/reassembly.h"

namespace awqd::engine {
namespace {

constexpr size_t kSumsSlot = 1;
// Slots of a gated MLP.
constexpr size_t kMiddleSlot = 1, kDownSlot = 2, kHalfSlot = 3, kHalfScaleSlot = 4;

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
            .activation = product.activation};
  }
  Grouped(const Grouped&) = delete;
  Grouped& operator=(const Grouped&) = delete;

  // Null: they run one by one.
  const KernelRow* FindRow(const ExpertProduct& product) const {
    const bool one = product.stack->experts.size() == 1;
    return one || product.path == Path::kDequantize ? nullptr : GroupedRow(args);
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
    const Path path = product.path.value_or(ChoosePath(lane, weight, rows));
    AWQD_RETURN_IF_ERROR(RunProduct(lane, args, path, report));
  }
  return absl::OkStatus();
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

std::vector<float> GroupedMatmulWork::CopyBias(absl::Span<const int64_t> which,
                                               model::ColumnSpan columns) const {
  std::vector<float> out;
  if (bias.empty()) return out;
  const int64_t n = stack->shape().n;
  for (int64_t expert : which) {
    const auto row = bias.begin() + expert * n;
    out.insert(out.end(), row + columns.begin, row + columns.end);
  }
  return out;
}

absl::StatusOr<WorkPartition> GroupedMatmulWork::Partition(StagingPool& staging) const {
  const model::PlacedWeight& weight = *stack->experts.front();
  const int64_t n = weight.shape.n;
  if (stack->expert_parallel()) {
    return PartitionExperts(*stack, staging, [&](size_t shard) {
      std::vector<int64_t> mine;
      for (int64_t e = 0; e < experts(); ++e) {
        if (stack->places[e].shard == shard) mine.push_back(e);
      }
      auto out = std::make_unique<GroupedMatmulWork>(*this);
      out->stack = stack->shards[shard];
      out->bias = CopyBias(mine, {0, n});
      return out;
    });
  }
  if (weight.partitioned_at_rows()) return PartitionAtRows(staging);
  std::vector<int64_t> all(experts());
  std::iota(all.begin(), all.end(), 0);
  return PartitionColumns({weight, {0, n}, y_rows(), SizeOf(out_dtype)},
                          [&](size_t, model::ColumnSpan columns) {
                            auto out = std::make_unique<GroupedMatmulWork>(*this);
                            out->bias = CopyBias(all, columns);
                            return out;
                          });
}

absl::StatusOr<WorkPartition> GroupedMatmulWork::PartitionAtRows(StagingPool& staging) const {
  const model::PlacedWeight& weight = *stack->experts.front();
  const Reduction reduction = {.count = y_rows(),
                               .cols = weight.shape.n,
                               .terms = summed ? top_k : 1,
                               .weights = router_weights,
                               .activation = activation,
                               .y_dtype = out_dtype};
  const auto make = [&](size_t i) -> absl::StatusOr<std::unique_ptr<Work>> {
    auto part = std::make_unique<GroupedMatmulWork>(*this);
    AWQD_ASSIGN_OR_RETURN(part->x, CopyColumns({x, x_dtype, rows}, weight.parts[i], staging));
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
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  return CombineAndFetch(lane, routed, product.y, y);
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
  alone.y.data = static_cast<char*>(product.y.data) +
                 product.x.rows * product.y.cols * SizeOf(product.y.dtype);
  return RunExperts(lane, alone, report);
}

// --- A gated MLP ---

bool GatedMlpWork::partitioned() const {
  return Work::partitioned() || gate_->expert_parallel() || up_->expert_parallel() ||
         down_->expert_parallel();
}

// Every device that has columns of gate has them of up, and the same rows of down.
absl::Status GatedMlpWork::CheckPartitionedAlike() const {
  const auto& [gate, up, down] = first_experts_;
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
        "factor or groups that 128 is no multiple of, or its path does not end in the name of a "
        "down projection; serve with --shard=replicas, --shard=models or --shard=experts"));
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

absl::StatusOr<WorkPartition> GatedMlpWork::Partition(StagingPool& staging) const {
  if (gate_->expert_parallel()) {
    const auto alike = [&](const model::WeightStack& stack) {
      return stack.devices() == gate_->devices() && stack.places == gate_->places;
    };
    if (!alike(*up_) || !alike(*down_)) {
      return absl::FailedPreconditionError(absl::StrCat(
          name(), ": got gate on ", gate_->devices(), ", up on ", up_->devices(), " and down on ",
          down_->devices(), ", expected each expert's on one device"));
    }
    return PartitionExperts(*gate_, staging, [&](size_t shard) {
      auto out = std::make_unique<GatedMlpWork>(gate_->shards[shard], up_->shards[shard],
                                                down_->shards[shard]);
      static_cast<RoutedWork&>(*out) = *this;
      return out;
    });
  }
  AWQD_RETURN_IF_ERROR(CheckPartitionedAlike());
  const Reduction reduction = {.count = y_rows(), .cols = down_->shape().n, .y_dtype = out_dtype};
  const auto make = [&](size_t) -> absl::StatusOr<std::unique_ptr<Work>> {
    auto part = std::make_unique<GatedMlpWork>(*this);
    part->out_dtype = DType::kFp32;
    return part;
  };
  return PartitionPartialSums(reduction, first_experts_[0]->parts.size(), make);
}

absl::Status GatedMlpWork::Compute(Lane& lane, const RoutedTokens& routed, char* y,
                                   ExecutionReport* report) const {
  const int64_t rows = routed.x.rows, middle = first().n, n = last().n;
  ExpertProduct product = {.stack = gate_.get(),
                           .also = up_.get(),
                           .part = part,
                           .x = routed.x,
                           .y = {nullptr, DType::kFp32, 2 * rows, middle},
                           .ends = routed.ends,
                           .path = path};
  const bool narrow = Narrows(routed, product);
  if (narrow) {
    product.y.dtype = x_dtype;
    product.x_scale = routed.factors;
  }
  // The rows of gate, then those of up.
  const int64_t both_bytes = 2 * rows * middle * SizeOf(product.y.dtype);
  AWQD_ASSIGN_OR_RETURN(product.y.data, lane.AllocateScratch(kMiddleSlot, both_bytes));
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  product.stack = down_.get();
  product.also = nullptr;
  const DType sums_dtype = narrow ? out_dtype : DType::kFp32;
  AWQD_RETURN_IF_ERROR(MultiplyGate(lane, product.y, NarrowFactor(sums_dtype), &product));
  if (routed.rows != nullptr) {
    const int64_t bytes = rows * n * SizeOf(sums_dtype);
    AWQD_ASSIGN_OR_RETURN(void* sums, lane.AllocateScratch(kDownSlot, bytes));
    product.y = {sums, sums_dtype, rows, n};
    AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
    return CombineAndFetch(lane, routed, product.y, y);
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
  // The factor of narrow rows is one of sums before the bias.
  for (const auto* stack : {gate_.get(), up_.get(), down_.get()}) {
    if (Here(*stack).bias() != nullptr) return false;
  }
  return true;
}

bool GatedMlpWork::Narrows(const RoutedTokens& routed, ExpertProduct product) const {
  if (!MayNarrow(routed.x.rows) || !IsOneKernel(product)) return false;
  product.stack = down_.get();
  product.also = nullptr;
  product.x = {nullptr, DType::kFp16, routed.x.rows, first().n};
  return first().n % 8 == 0 && IsOneKernel(product);
}

absl::Status GatedMlpWork::MultiplyGate(Lane& lane, const MatrixView& both, float sums_factor,
                                        ExpertProduct* down) const {
  const int64_t middle = first().n, rows = both.rows / 2;
  GateArgs args = {.gate = both.data,
                   .up = static_cast<char*>(both.data) + rows * middle * SizeOf(both.dtype),
                   .count = rows * middle,
                   .activation = activation,
                   .dtype = both.dtype,
                   .sums_factor = sums_factor};
  // One kernel for all experts reads FP16 with a scale for each row. Else the prologue makes it of
  // FP32.
  down->x = {nullptr, DType::kFp16, rows, middle};
  if (middle % 8 == 0 && IsOneKernel(*down)) {
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
