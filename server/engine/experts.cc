// RoutedWork: gather the tokens of a batch, sort them by expert, multiply, combine.
#include "server/engine/experts.h"

#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"
#include "server/engine/matmul_work.h"

namespace awqd::engine {
namespace {

// Buffers of a lane that last from step to step (Lane::Scratch). Those of a work follow.
constexpr size_t kSortedSlot = 0;

}  // namespace

// Counting sort: stable, so that the rows of an expert keep the tokens' order.
ExpertOrder SortByExpert(absl::Span<const int32_t> ids, int64_t top_k, int64_t experts) {
  ExpertOrder out;
  out.ends.assign(experts, 0);
  out.tokens.resize(ids.size());
  out.rows.resize(ids.size());
  for (int32_t id : ids) ++out.ends[id];
  std::vector<int64_t> next(experts);
  int64_t begin = 0;
  for (int64_t e = 0; e < experts; ++e) {
    next[e] = begin;
    begin += out.ends[e];
    out.ends[e] = begin;
  }
  for (size_t choice = 0; choice < ids.size(); ++choice) {
    const int64_t row = next[ids[choice]]++;
    out.tokens[row] = static_cast<int32_t>(static_cast<int64_t>(choice) / top_k);
    out.rows[choice] = static_cast<int32_t>(row);
  }
  return out;
}

// The tokens of one work, or some of them.
struct RoutedWork::Piece {
  RowPiece x;
  const int32_t* ids = nullptr;
  const float* weights = nullptr;
};

int64_t RoutedWork::bytes() const {
  return x.size() + static_cast<int64_t>((ids.size() + router_weights.size()) * 4);
}

int64_t RoutedWork::y_row_bytes() const {
  return (router_weights.empty() ? top_k : 1) * last().n * SizeOf(out_dtype);
}

int64_t RoutedWork::result_bytes() const { return rows * y_row_bytes(); }

int64_t RoutedWork::cost() const {
  const double cost = static_cast<double>(tokens()) * row_cost();
  return cost < 1e18 ? static_cast<int64_t>(cost) : kUnknownCost;
}

uint32_t RoutedWork::variant() const {
  const uint32_t asked = path.has_value() ? 1 + static_cast<uint32_t>(*path) : 0;
  const uint32_t summed = router_weights.empty() ? 0 : 1;
  return static_cast<uint32_t>(top_k) << 16 | summed << 15 | asked << 12 |
         static_cast<uint32_t>(activation) << 8 | static_cast<uint32_t>(x_dtype) << 4 |
         static_cast<uint32_t>(out_dtype);
}

absl::Status RoutedWork::Run(Lane& lane, const batching::Batch& batch, char* result,
                             ExecutionReport* report) const {
  absl::InlinedVector<Piece, 8> pieces;
  pieces.reserve(batch.tasks.size());
  for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
    const auto& work = static_cast<const RoutedWork&>(*task);
    pieces.push_back({{work.x.data(), work.rows}, work.ids.data(), work.router_weights.data()});
  }
  const int64_t most = std::max<int64_t>(1, lane.max_rows() / top_k);
  if (pieces.size() > 1 || rows <= most) return RunPieces(lane, pieces, result, report);
  // One work larger than a batch may be: in steps, so that the lane's buffers stay bounded.
  const int64_t x_row = first().k * SizeOf(x_dtype);
  for (int64_t row = 0; row < rows; row += most) {
    Piece piece = {{x.data() + row * x_row, std::min(most, rows - row)}};
    if (!ids.empty()) piece.ids = ids.data() + row * top_k;
    if (!router_weights.empty()) piece.weights = router_weights.data() + row * top_k;
    AWQD_RETURN_IF_ERROR(RunPieces(lane, {&piece, 1}, result + row * y_row_bytes(), report));
  }
  return absl::OkStatus();
}

absl::Status RoutedWork::RunPieces(Lane& lane, absl::Span<const Piece> pieces, char* y,
                                   ExecutionReport* report) const {
  absl::InlinedVector<RowPiece, 8> x_pieces;
  std::vector<int32_t> choices;
  std::vector<float> weights;
  for (const Piece& piece : pieces) {
    x_pieces.push_back(piece.x);
    const int64_t count = piece.x.rows * top_k;
    if (!ids.empty()) choices.insert(choices.end(), piece.ids, piece.ids + count);
    if (!router_weights.empty())
      weights.insert(weights.end(), piece.weights, piece.weights + count);
  }
  const int64_t k = first().k, count = Rows(x_pieces), row_bytes = k * SizeOf(x_dtype);
  if (count == 0) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const void* tokens, lane.Gather(x_pieces, row_bytes));
  RoutedTokens routed = {.x = {tokens, x_dtype, count, k}};
  if (ids.empty()) {
    routed.ends = {&count, 1};
    return Compute(lane, routed, y, report);
  }
  const ExpertOrder order = SortByExpert(choices, top_k, experts());
  const auto upload = [&](const auto& list) { return lane.Upload(list.data(), list.size() * 4); };
  AWQD_ASSIGN_OR_RETURN(const void* sources, upload(order.tokens));
  AWQD_ASSIGN_OR_RETURN(const void* rows_there, upload(order.rows));
  if (!weights.empty()) {
    AWQD_ASSIGN_OR_RETURN(const void* weights_there, upload(weights));
    routed.weights = static_cast<const float*>(weights_there);
  }
  routed.rows = static_cast<const int32_t*>(rows_there);
  routed.ends = order.ends;
  routed.x.rows = count * top_k;
  AWQD_ASSIGN_OR_RETURN(void* sorted, lane.Scratch(kSortedSlot, routed.x.rows * row_bytes));
  routed.x.data = sorted;
  AWQD_RETURN_IF_ERROR(GatherRows({.in = tokens,
                                   .rows = static_cast<const int32_t*>(sources),
                                   .count = routed.x.rows,
                                   .row_bytes = row_bytes,
                                   .out = sorted},
                                  on(), lane.stream()));
  return Compute(lane, routed, y, report);
}

absl::Status RoutedWork::Combine(Lane& lane, const RoutedTokens& routed, const void* sums,
                                 char* y) const {
  const int64_t terms = routed.weights == nullptr ? 1 : top_k;
  const int64_t count = routed.x.rows / terms;
  const int64_t y_bytes = count * last().n * SizeOf(out_dtype);
  AWQD_ASSIGN_OR_RETURN(void* target, lane.Target(y, y_bytes));
  AWQD_RETURN_IF_ERROR(CombineRows({.in = static_cast<const float*>(sums),
                                    .cols = last().n,
                                    .rows = routed.rows,
                                    .weights = routed.weights,
                                    .count = count,
                                    .terms = terms,
                                    .y = target,
                                    .y_dtype = out_dtype},
                                   on(), lane.stream()));
  return lane.Fetch(y, target, y_bytes);
}

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
