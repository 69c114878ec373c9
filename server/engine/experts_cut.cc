// RoutedWork on a stack that is spread: which choices go to which device, and what comes back.
#include <cstring>
#include <utility>

#include "kernels/base/status.h"
#include "server/engine/routed_work.h"

namespace awqd::engine {
namespace {

// The choices of one share.
struct ShareChoices {
  std::vector<int32_t> ids;                // in the share
  std::vector<int32_t> places;             // which choice of the whole work each is
  std::vector<int32_t> tokens;             // that have any, ascending
  std::vector<int32_t> tokens_of_choices;  // of each choice: its number in `tokens`
};

std::vector<ShareChoices> Distribute(const model::WeightStack& stack, absl::Span<const int32_t> ids,
                                     int64_t top_k) {
  std::vector<ShareChoices> out(stack.shares.size());
  for (size_t choice = 0; choice < ids.size(); ++choice) {
    const model::ExpertHome& home = stack.homes[ids[choice]];
    ShareChoices& share = out[home.share];
    const auto token = static_cast<int32_t>(static_cast<int64_t>(choice) / top_k);
    if (share.tokens.empty() || share.tokens.back() != token) share.tokens.push_back(token);
    share.ids.push_back(home.number);
    share.places.push_back(static_cast<int32_t>(choice));
    share.tokens_of_choices.push_back(static_cast<int32_t>(share.tokens.size()) - 1);
  }
  return out;
}

// These rows of `x`; x itself where they are all.
absl::StatusOr<Payload> RowsOf(const Payload& x, int64_t rows, absl::Span<const int32_t> wanted,
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

}  // namespace

absl::StatusOr<WorkCut> RoutedWork::CutAtShares(
    const model::WeightStack& stack, StagingPool& staging,
    absl::FunctionRef<std::unique_ptr<RoutedWork>(size_t share)> make) const {
  const int64_t row_bytes = last().n * SizeOf(out_dtype);
  WorkCut out = {.bytes = y_rows() * row_bytes};
  std::vector<ShareChoices> shares = Distribute(stack, ids, top_k);
  std::vector<std::vector<int32_t>> places;
  for (size_t i = 0; i < shares.size(); ++i) {
    ShareChoices& mine = shares[i];
    const bool all = mine.ids.size() == ids.size();
    if (mine.ids.empty() && !(all && i == 0)) continue;  // no choices at all still get an answer
    std::unique_ptr<RoutedWork> part = make(i);
    part->ids = std::move(mine.ids);
    if (all) {  // where they are summed as well
      part->x = x;
      part->router_weights = router_weights;
      out.parts.push_back(std::move(part));
      return out;
    }
    AWQD_ASSIGN_OR_RETURN(part->x, RowsOf(x, rows, mine.tokens, staging));
    part->rows = static_cast<int64_t>(mine.tokens.size());
    part->top_k = 1;
    part->summed = false;
    part->router_weights.clear();
    part->choice_tokens = std::move(mine.tokens_of_choices);
    if (summed) part->out_dtype = DType::kFp32;
    places.push_back(std::move(mine.places));
    out.parts.push_back(std::move(part));
  }
  if (!summed) {
    out.join = std::make_unique<RowsJoin>(row_bytes, std::move(places));
    return out;
  }
  out.join = std::make_unique<ChoicesJoin>(SumShape{.count = rows,
                                                    .cols = last().n,
                                                    .terms = top_k,
                                                    .weights = router_weights,
                                                    .y_dtype = out_dtype},
                                           std::move(places));
  return out;
}

}  // namespace awqd::engine
