// Gathers the tokens of a batch, sorts them by expert, multiplies, combines; and partitions by
// experts.
#include "server/engine/routed_work.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"
#include "server/engine/matmul_work.h"
#include "server/engine/reassembly.h"

namespace awqd::engine {
namespace {

// A buffer of a lane that lasts from step to step (Lane::AllocateScratch). Those of a work follow.
constexpr size_t kSortedSlot = 0, kFactorsSlot = 5, kSharedWeightsSlot = 6;

// The choices of one shard.
struct ShardChoices {
  std::vector<int32_t> ids;                // in the shard
  std::vector<int32_t> places;             // the number of each choice in the whole work
  std::vector<int32_t> tokens;             // with any choice, ascending
  std::vector<int32_t> tokens_of_choices;  // of each choice: its number in `tokens`
};

std::vector<ShardChoices> DistributeChoices(const model::WeightStack& stack,
                                            absl::Span<const int32_t> ids, int64_t top_k) {
  std::vector<ShardChoices> out(stack.shards.size());
  for (size_t choice = 0; choice < ids.size(); ++choice) {
    const model::ExpertPlace& place = stack.places[ids[choice]];
    ShardChoices& shard = out[place.shard];
    const auto token = static_cast<int32_t>(static_cast<int64_t>(choice) / top_k);
    if (shard.tokens.empty() || shard.tokens.back() != token) shard.tokens.push_back(token);
    shard.ids.push_back(place.number);
    shard.places.push_back(static_cast<int32_t>(choice));
    shard.tokens_of_choices.push_back(static_cast<int32_t>(shard.tokens.size()) - 1);
  }
  return out;
}

// Copies these rows of `x`; returns x itself where they are all.
absl::StatusOr<Payload> CopyRows(const Payload& x, int64_t rows, absl::Span<const int32_t> wanted,
                                 StagingPool& staging) {
  const auto count = static_cast<int64_t>(wanted.size());
  if (count == rows) return x;
  const int64_t row_bytes = x.size() / rows;
  AWQD_ASSIGN_OR_RETURN(Payload out, staging.Get(count * row_bytes));
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(out.data() + i * row_bytes, x.data() + wanted[i] * row_bytes, row_bytes);
  }
  staging.CountCopy(out.size());
  return out;
}

// The scales of these tokens, `each` of every one.
std::vector<float> CopyScales(absl::Span<const float> scales, int64_t each,
                              absl::Span<const int32_t> tokens) {
  std::vector<float> out;
  for (const int32_t token : tokens) {
    const auto own = scales.subspan(token * each, each);
    out.insert(out.end(), own.begin(), own.end());
  }
  return out;
}

// Each token gets one more term, of weight 1: the rows of one more part, in the order of the tokens.
void AddSharedTerms(Reduction* reduction, RowPlaces* places) {
  const int64_t top_k = reduction->terms++;
  std::vector<float> weights;
  std::vector<int32_t> of_shared;
  for (int64_t token = 0; token < reduction->count; ++token) {
    const auto own = reduction->weights.begin() + token * top_k;
    weights.insert(weights.end(), own, own + top_k);
    of_shared.push_back(static_cast<int32_t>(weights.size()));
    weights.push_back(1);
  }
  reduction->weights = std::move(weights);
  for (std::vector<int32_t>& part : *places) {
    for (int32_t& place : part) place += static_cast<int32_t>(place / top_k);
  }
  places->push_back(std::move(of_shared));
}

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
  int32_t first_token = 0;          // the number in `tokens` of x's first row
  const float* weights = nullptr;
  const float* scales = nullptr;  // scales_each() of each token, or null
  absl::Span<const float> shared_expert_gate;
};

uint64_t RoutedWork::variant(absl::Span<const Rounding* const> roundings) const {
  uint64_t rounded = token_scales.empty() ? 0 : 1;
  for (const Rounding* rounding : roundings) {
    rounded = rounded << 3 | static_cast<uint64_t>(rounding->how);
  }
  const uint64_t asked = path.has_value() ? 1 + static_cast<uint64_t>(*path) : 0;
  // A part never merges with a work that has all choices of its tokens.
  const auto choices_each = static_cast<uint64_t>(choice_tokens.empty() ? top_k : 0);
  return rounded << 40 | choices_each << 32 | uint64_t{!shared_expert_gate.empty()} << 26 |
         uint64_t{of_experts} << 25 | uint64_t{summed} << 24 | asked << 20 |
         static_cast<uint64_t>(activation) << 16 | static_cast<uint64_t>(x_dtype) << 8 |
         static_cast<uint64_t>(out_dtype);
}

absl::Status RoutedWork::Run(Lane& lane, const batching::Batch& batch, char* result,
                             ExecutionReport* report) const {
  absl::InlinedVector<Piece, 8> pieces;
  pieces.reserve(batch.tasks.size());
  for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
    const auto& work = static_cast<const RoutedWork&>(*task);
    pieces.push_back({.x = {work.x.data(), work.rows, work.x.device()},
                      .choices = work.choices(),
                      .ids = work.ids.data(),
                      .tokens = work.choice_tokens.empty() ? nullptr : work.choice_tokens.data(),
                      .weights = work.router_weights.data(),
                      .scales = work.token_scales.empty() ? nullptr : work.token_scales.data(),
                      .shared_expert_gate = work.shared_expert_gate});
  }
  if (pieces.size() > 1 || choices() <= std::max(top_k, lane.max_rows())) {
    return RunPieces(lane, pieces, result, report);
  }
  return RunWorkInSteps(lane, result, report);
}

absl::Status RoutedWork::RunWorkInSteps(Lane& lane, char* y, ExecutionReport* report) const {
  const bool whole = choice_tokens.empty();  // steps of tokens, with all of their choices
  const int64_t most = std::max<int64_t>(1, lane.max_rows() / top_k);
  const int64_t x_row = first().k * SizeOf(x_dtype);
  const int64_t y_row = last().n * SizeOf(out_dtype) * (summed ? 1 : top_k);
  return RunInSteps(choices() / top_k, most, [&](int64_t begin, int64_t count) {
    const int64_t first_token = whole ? begin : choice_tokens[begin];
    const int64_t last_token = whole ? begin + count - 1 : choice_tokens[begin + count - 1];
    Piece piece = {.x = {x.data() + first_token * x_row, last_token - first_token + 1, x.device()},
                   .choices = count * top_k,
                   .first_token = static_cast<int32_t>(first_token),
                   .shared_expert_gate = shared_expert_gate};
    if (of_experts) piece.ids = ids.data() + begin * top_k;
    if (!whole) piece.tokens = choice_tokens.data() + begin;
    if (summed) piece.weights = router_weights.data() + begin * top_k;
    if (!token_scales.empty()) piece.scales = token_scales.data() + first_token * scales_each();
    return RunPieces(lane, {&piece, 1}, y + begin * y_row, report);
  });
}

absl::Status RoutedWork::RunPieces(Lane& lane, absl::Span<const Piece> pieces, char* y,
                                   ExecutionReport* report) const {
  absl::InlinedVector<RowPiece, 8> x_pieces;
  std::vector<int32_t> all_ids, all_tokens;
  std::vector<float> weights, all_scales, scales;
  int64_t begin = 0;
  for (const Piece& piece : pieces) {
    x_pieces.push_back(piece.x);
    if (of_experts) all_ids.insert(all_ids.end(), piece.ids, piece.ids + piece.choices);
    for (int64_t i = 0; piece.tokens != nullptr && i < piece.choices; ++i) {
      all_tokens.push_back(static_cast<int32_t>(begin + piece.tokens[i] - piece.first_token));
    }
    begin += piece.x.rows;
    if (piece.scales != nullptr) {
      const int64_t numbers = piece.x.rows * scales_each();
      all_scales.insert(all_scales.end(), piece.scales, piece.scales + numbers);
    }
    if (summed) {
      weights.insert(weights.end(), piece.weights, piece.weights + piece.choices);
    }
  }
  const int64_t k = first().k, count = CountRows(x_pieces), row_bytes = k * SizeOf(x_dtype);
  if (count == 0) return absl::OkStatus();
  AWQD_ASSIGN_OR_RETURN(const void* tokens, lane.GatherRows(x_pieces, row_bytes));
  RoutedTokens routed = {.x = {tokens, x_dtype, count, k}, .tokens = {tokens, x_dtype, count, k}};
  routed.scales = routed.scales_of_tokens = all_scales;
  if (!shared_expert_gate.empty()) AWQD_RETURN_IF_ERROR(GateShared(lane, pieces, &routed));
  if (!of_experts) {
    routed.ends = {&count, 1};
    return Compute(lane, routed, y, report);
  }
  const ExpertOrder order = SortByExpert(all_ids, top_k, experts(), all_tokens);
  const auto upload = [&](const auto& list) { return lane.Upload(list.data(), list.size() * 4); };
  AWQD_ASSIGN_OR_RETURN(const void* sources, upload(order.tokens));
  AWQD_ASSIGN_OR_RETURN(const void* rows_there, upload(order.rows));
  if (summed) {
    AWQD_ASSIGN_OR_RETURN(routed.weights, lane.Upload(weights));
  }
  routed.rows = static_cast<const int32_t*>(rows_there);
  routed.ends = order.ends;
  if (!all_scales.empty()) scales = CopyScales(all_scales, scales_each(), order.tokens);
  routed.scales = scales;
  routed.sources = static_cast<const int32_t*>(sources);
  routed.x = {nullptr, x_dtype, static_cast<int64_t>(order.rows.size()), k};
  if (GathersTokens(routed)) return Compute(lane, routed, y, report);
  AWQD_ASSIGN_OR_RETURN(void* sorted, lane.AllocateScratch(kSortedSlot, routed.x.rows * row_bytes));
  routed.x.data = sorted;
  float* factors = nullptr;
  if (x_dtype == DType::kFp16 && MayNarrow(routed.x.rows)) {
    AWQD_ASSIGN_OR_RETURN(void* room, lane.AllocateScratch(kFactorsSlot, routed.x.rows * 4));
    routed.factors = factors = static_cast<float*>(room);
  }
  AWQD_RETURN_IF_ERROR(GatherRows({.in = tokens,
                                   .rows = routed.sources,
                                   .count = routed.x.rows,
                                   .row_bytes = row_bytes,
                                   .out = sorted,
                                   .factors = factors},
                                  step_device(), lane.stream()));
  return Compute(lane, routed, y, report);
}

// The gates of a batch are mostly one: that of the layer.
absl::Status RoutedWork::GateShared(Lane& lane, absl::Span<const Piece> pieces,
                                    RoutedTokens* routed) const {
  std::vector<float> gates;
  std::vector<int32_t> which;
  absl::Span<const float> last;
  int32_t number = -1;
  for (const Piece& piece : pieces) {
    if (piece.shared_expert_gate != last) {
      last = piece.shared_expert_gate;
      gates.insert(gates.end(), last.begin(), last.end());
      ++number;
    }
    which.insert(which.end(), piece.x.rows, number);
  }
  TokenGateArgs args = {.x = routed->tokens};
  AWQD_ASSIGN_OR_RETURN(args.gates, lane.Upload(gates));
  AWQD_ASSIGN_OR_RETURN(const void* there, lane.Upload(which.data(), which.size() * 4));
  args.which = static_cast<const int32_t*>(there);  // read before this returns on the CPU
  if (!routed->scales_of_tokens.empty()) {
    AWQD_ASSIGN_OR_RETURN(args.scales, lane.Upload(routed->scales_of_tokens));
    args.scaled = scales_each() == 1 ? args.x.cols : kScaledBlock;
  }
  AWQD_ASSIGN_OR_RETURN(void* out, lane.AllocateScratch(kSharedWeightsSlot, which.size() * 4));
  routed->shared_weights = args.out = static_cast<float*>(out);
  return GateTokens(args, step_device(), lane.stream());
}

absl::Status RoutedWork::CombineAndFetch(Lane& lane, const RoutedTokens& routed,
                                         const MatrixView& sums, const float* shared,
                                         char* y) const {
  const int64_t terms = routed.weights == nullptr ? 1 : top_k;
  const int64_t count = routed.x.rows / terms;
  const int64_t y_bytes = count * last().n * SizeOf(out_dtype);
  AWQD_ASSIGN_OR_RETURN(void* target, lane.AllocateResult(y, y_bytes));
  const int32_t* places = routed.rows;
  std::vector<int32_t> in_order;  // on the CPU read until Fetch
  if (places == nullptr) {
    in_order.resize(routed.x.rows);
    std::iota(in_order.begin(), in_order.end(), 0);
    AWQD_ASSIGN_OR_RETURN(const void* there, lane.Upload(in_order.data(), routed.x.rows * 4));
    places = static_cast<const int32_t*>(there);
  }
  AWQD_RETURN_IF_ERROR(CombineRows({.in = sums.data,
                                    .cols = last().n,
                                    .rows = places,
                                    .weights = routed.weights,
                                    .count = count,
                                    .terms = terms,
                                    .y = target,
                                    .y_dtype = out_dtype,
                                    .in_dtype = sums.dtype,
                                    .added = shared,
                                    .added_weights = routed.shared_weights},
                                   step_device(), lane.stream()));
  return lane.Fetch(y, target, y_bytes);
}

absl::StatusOr<WorkPartition> RoutedWork::PartitionExperts(
    const model::WeightStack& stack, StagingPool& staging,
    absl::FunctionRef<std::unique_ptr<RoutedWork>(size_t shard)> make,
    std::unique_ptr<RoutedWork> shared) const {
  const int64_t row_bytes = last().n * SizeOf(out_dtype);
  WorkPartition out;
  out.bytes = y_rows() * row_bytes;
  std::vector<ShardChoices> shards = DistributeChoices(stack, ids, top_k);
  RowPlaces places;
  for (size_t i = 0; i < shards.size(); ++i) {
    ShardChoices& mine = shards[i];
    const bool all = mine.ids.size() == ids.size();
    if (mine.ids.empty() && !(all && i == 0)) continue;  // no choices at all still get an answer
    std::unique_ptr<RoutedWork> part = make(i);
    part->ids = std::move(mine.ids);
    if (all && (shared == nullptr || ids.empty())) {  // where they are summed as well
      part->x = x;
      part->router_weights = router_weights;
      out.parts.push_back(std::move(part));
      return out;
    }
    AWQD_ASSIGN_OR_RETURN(part->x, CopyRows(x, rows, mine.tokens, staging));
    part->rows = static_cast<int64_t>(mine.tokens.size());
    part->token_scales = CopyScales(token_scales, scales_each(), mine.tokens);
    part->top_k = 1;
    part->summed = false;
    part->router_weights.clear();
    part->choice_tokens = std::move(mine.tokens_of_choices);
    if (summed) part->out_dtype = DType::kFp32;
    places.push_back(std::move(mine.places));
    out.parts.push_back(std::move(part));
  }
  if (!summed) {
    out.reassembler = ReassembleRows(row_bytes, std::move(places));
    return out;
  }
  Reduction reduction = {.count = rows,
                         .cols = last().n,
                         .terms = top_k,
                         .weights = router_weights,
                         .y_dtype = out_dtype};
  if (shared != nullptr) AddSharedTerms(&reduction, &places);
  if (shared != nullptr) out.parts.push_back(std::move(shared));
  out.reassembler = ReassembleExpertRows(reduction, std::move(places));
  return out;
}

}  // namespace awqd::engine
