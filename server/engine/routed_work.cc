// RoutedWork: gather the tokens of a batch, sort them by expert, multiply, combine.
#include "server/engine/routed_work.h"

#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"

namespace awqd::engine {
namespace {

// Buffers of a lane that last from step to step (Lane::Scratch). Those of a work follow.
constexpr size_t kSortedSlot = 0;

}  // namespace

// Counting sort: stable, so that the rows of an expert keep the tokens' order.
ExpertOrder SortByExpert(absl::Span<const int32_t> ids, int64_t top_k, int64_t experts,
                         absl::Span<const int32_t> tokens) {
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
    out.tokens[row] = tokens.empty() ? static_cast<int32_t>(static_cast<int64_t>(choice) / top_k)
                                     : tokens[choice];
    out.rows[choice] = static_cast<int32_t>(row);
  }
  return out;
}

// The tokens of one work and their choices, or some of them.
struct RoutedWork::Piece {
  RowPiece x;
  int64_t choices = 0;
  const int32_t* ids = nullptr;
  const int32_t* tokens = nullptr;  // of each choice, or null
  int32_t first_token = 0;          // what `tokens` counts x's first row as
  const float* weights = nullptr;
};

int64_t RoutedWork::bytes() const {
  return x.size() +
         static_cast<int64_t>((ids.size() + choice_tokens.size() + router_weights.size()) * 4);
}

int64_t RoutedWork::result_bytes() const { return y_rows() * last().n * SizeOf(out_dtype); }

int64_t RoutedWork::cost() const {
  const double cost = static_cast<double>(tokens()) * row_cost();
  return cost < 1e18 ? static_cast<int64_t>(cost) : kUnknownCost;
}

uint64_t RoutedWork::variant() const {
  const uint64_t asked = path.has_value() ? 1 + static_cast<uint64_t>(*path) : 0;
  // A part never merges with a work that has all choices of its tokens.
  const auto choices_each = static_cast<uint64_t>(choice_tokens.empty() ? top_k : 0);
  return choices_each << 32 | uint64_t{of_experts} << 25 | uint64_t{summed} << 24 | asked << 20 |
         static_cast<uint64_t>(activation) << 16 | static_cast<uint64_t>(x_dtype) << 8 |
         static_cast<uint64_t>(out_dtype);
}

absl::Status RoutedWork::Run(Lane& lane, const batching::Batch& batch, char* result,
                             ExecutionReport* report) const {
  absl::InlinedVector<Piece, 8> pieces;
  pieces.reserve(batch.tasks.size());
  for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
    const auto& work = static_cast<const RoutedWork&>(*task);
    pieces.push_back({.x = {work.x.data(), work.rows},
                      .choices = work.choices(),
                      .ids = work.ids.data(),
                      .tokens = work.choice_tokens.empty() ? nullptr : work.choice_tokens.data(),
                      .weights = work.router_weights.data()});
  }
  if (pieces.size() > 1 || choices() <= std::max(top_k, lane.max_rows())) {
    return RunPieces(lane, pieces, result, report);
  }
  return choice_tokens.empty() ? RunInSteps(lane, result, report)
                               : RunChoicesInSteps(lane, result, report);
}

absl::Status RoutedWork::RunInSteps(Lane& lane, char* y, ExecutionReport* report) const {
  const int64_t most = std::max<int64_t>(1, lane.max_rows() / top_k);
  const int64_t x_row = first().k * SizeOf(x_dtype);
  const int64_t y_row = last().n * SizeOf(out_dtype) * (summed ? 1 : top_k);
  for (int64_t row = 0; row < rows; row += most) {
    Piece piece = {.x = {x.data() + row * x_row, std::min(most, rows - row)}};
    piece.choices = piece.x.rows * top_k;
    if (of_experts) piece.ids = ids.data() + row * top_k;
    if (summed) piece.weights = router_weights.data() + row * top_k;
    AWQD_RETURN_IF_ERROR(RunPieces(lane, {&piece, 1}, y + row * y_row, report));
  }
  return absl::OkStatus();
}

absl::Status RoutedWork::RunChoicesInSteps(Lane& lane, char* y, ExecutionReport* report) const {
  const int64_t most = std::max<int64_t>(1, lane.max_rows());
  const int64_t x_row = first().k * SizeOf(x_dtype);
  const int64_t y_row = last().n * SizeOf(out_dtype);
  for (int64_t choice = 0; choice < choices(); choice += most) {
    const int64_t count = std::min(most, choices() - choice);
    const int32_t first_token = choice_tokens[choice];
    const int32_t last_token = choice_tokens[choice + count - 1];
    const Piece piece = {.x = {x.data() + first_token * x_row, last_token - first_token + 1},
                         .choices = count,
                         .ids = ids.data() + choice,
                         .tokens = choice_tokens.data() + choice,
                         .first_token = first_token};
    AWQD_RETURN_IF_ERROR(RunPieces(lane, {&piece, 1}, y + choice * y_row, report));
  }
  return absl::OkStatus();
}

absl::Status RoutedWork::RunPieces(Lane& lane, absl::Span<const Piece> pieces, char* y,
                                   ExecutionReport* report) const {
  absl::InlinedVector<RowPiece, 8> x_pieces;
  std::vector<int32_t> all_ids, all_tokens;
  std::vector<float> weights;
  int64_t begin = 0;
  for (const Piece& piece : pieces) {
    x_pieces.push_back(piece.x);
    if (of_experts) all_ids.insert(all_ids.end(), piece.ids, piece.ids + piece.choices);
    for (int64_t i = 0; piece.tokens != nullptr && i < piece.choices; ++i) {
      all_tokens.push_back(static_cast<int32_t>(begin + piece.tokens[i] - piece.first_token));
    }
    begin += piece.x.rows;
    if (summed) {
      weights.insert(weights.end(), piece.weights, piece.weights + piece.choices);
    }
  }
  const int64_t k = first().k, count = Rows(x_pieces), row_bytes = k * SizeOf(x_dtype);
  if (count == 0) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const void* tokens, lane.Gather(x_pieces, row_bytes));
  RoutedTokens routed = {.x = {tokens, x_dtype, count, k}};
  if (!of_experts) {
    routed.ends = {&count, 1};
    return Compute(lane, routed, y, report);
  }
  const ExpertOrder order = SortByExpert(all_ids, top_k, experts(), all_tokens);
  const auto upload = [&](const auto& list) { return lane.Upload(list.data(), list.size() * 4); };
  AWQD_ASSIGN_OR_RETURN(const void* sources, upload(order.tokens));
  AWQD_ASSIGN_OR_RETURN(const void* rows_there, upload(order.rows));
  if (summed) {
    AWQD_ASSIGN_OR_RETURN(const void* weights_there, upload(weights));
    routed.weights = static_cast<const float*>(weights_there);
  }
  routed.rows = static_cast<const int32_t*>(rows_there);
  routed.ends = order.ends;
  routed.x.rows = static_cast<int64_t>(order.rows.size());
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

}  // namespace awqd::engine
