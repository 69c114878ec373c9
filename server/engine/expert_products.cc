// The products of a stack: by one kernel for all experts, or one by one.
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"
#include "server/engine/matmul_work.h"
#include "server/engine/routed_work.h"

namespace awqd::engine {
namespace {

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
  const KernelRow* Row(const ExpertProduct& product) const {
    const bool one = product.stack->experts.size() == 1;
    return one || product.path == Path::kDequantize ? nullptr : GroupedRow(args);
  }
};

// Expert by expert, of one stack.
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
    const Path path = product.path.value_or(PathFor(lane, weight, rows));
    AWQD_RETURN_IF_ERROR(RunProduct(lane, args, path, report));
  }
  return absl::OkStatus();
}

// All at once.
absl::Status RunGrouped(Lane& lane, GroupedArgs args, const KernelRow& row,
                        ExecutionReport* report) {
  const std::string table = GroupedTable(args, row);
  AWQD_ASSIGN_OR_RETURN(args.table, lane.Upload(table.data(), static_cast<int64_t>(table.size())));
  AWQD_ASSIGN_OR_RETURN(args.workspace, lane.Workspace(GroupedWorkspaceBytes(args, row)));
  AWQD_RETURN_IF_ERROR(GroupedMatmul(args, row, lane.stream()));
  AddKernel(&row, report);
  return absl::OkStatus();
}

}  // namespace

bool RunsAtOnce(const ExpertProduct& product) { return Grouped(product).Row(product) != nullptr; }

absl::Status RunExperts(Lane& lane, const ExpertProduct& product, ExecutionReport* report) {
  const Grouped grouped(product);
  if (const KernelRow* const row = grouped.Row(product)) {
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
