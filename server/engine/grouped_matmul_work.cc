// One product for each expert that has rows, by one kernel for all experts or one by one; then each
// token's rows are combined.
#include "server/engine/grouped_matmul_work.h"

#include <numeric>
#include <utility>

#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"
#include "server/engine/matmul_work.h"
#include "server/engine/reassembly.h"

namespace awqd::engine {
namespace {

constexpr size_t kSumsSlot = 1;

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
  const std::string table = GroupedTable(args, row);
  AWQD_ASSIGN_OR_RETURN(args.table, lane.Upload(table.data(), static_cast<int64_t>(table.size())));
  AWQD_ASSIGN_OR_RETURN(args.workspace, lane.AllocateWorkspace(GroupedWorkspaceBytes(args, row)));
  AWQD_RETURN_IF_ERROR(GroupedMatmul(args, row, lane.stream()));
  AddKernel(&row, report);
  return absl::OkStatus();
}

}  // namespace

batching::BatchKey GroupedMatmulWork::merge_key() const {
  if (!bias.empty()) return {};
  return {&here(), variant()};
}

double GroupedMatmulWork::row_cost() const {
  return static_cast<double>(here().shape.k) * static_cast<double>(here().shape.n);
}

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
  return CombineAndFetch(lane, routed, sums, y);
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

}  // namespace awqd::engine
