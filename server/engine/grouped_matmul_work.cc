// GroupedMatmulWork: one product for each expert that has rows, then each token's rows together.
#include "server/engine/grouped_matmul_work.h"

#include <numeric>
#include <utility>

#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"

namespace awqd::engine {
namespace {

constexpr size_t kSumsSlot = 1;

}  // namespace

batching::BatchKey GroupedMatmulWork::merge_key() const {
  if (!bias.empty()) return {};
  return {&here(), variant()};
}

double GroupedMatmulWork::row_cost() const {
  return static_cast<double>(here().shape.k) * static_cast<double>(here().shape.n);
}

std::vector<float> GroupedMatmulWork::BiasOf(absl::Span<const int64_t> which,
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

absl::StatusOr<WorkCut> GroupedMatmulWork::Cut(StagingPool& staging) const {
  const model::PlacedWeight& weight = *stack->experts.front();
  const int64_t n = weight.shape.n;
  if (stack->spread()) {
    return CutAtShares(*stack, staging, [&](size_t share) {
      std::vector<int64_t> mine;
      for (int64_t e = 0; e < experts(); ++e) {
        if (stack->homes[e].share == share) mine.push_back(e);
      }
      auto out = std::make_unique<GroupedMatmulWork>(*this);
      out->stack = stack->shares[share];
      out->bias = BiasOf(mine, {0, n});
      return out;
    });
  }
  if (weight.cut_at_rows()) return CutAtRows(staging);
  std::vector<int64_t> all(experts());
  std::iota(all.begin(), all.end(), 0);
  return CutAtColumns({weight, {0, n}, y_rows(), SizeOf(out_dtype)},
                      [&](size_t, model::ColumnSpan columns) {
                        auto out = std::make_unique<GroupedMatmulWork>(*this);
                        out->bias = BiasOf(all, columns);
                        return out;
                      });
}

absl::StatusOr<WorkCut> GroupedMatmulWork::CutAtRows(StagingPool& staging) const {
  const model::PlacedWeight& weight = *stack->experts.front();
  WorkCut out = {.bytes = y_rows() * weight.shape.n * SizeOf(out_dtype)};
  for (size_t i = 0; i < weight.parts.size(); ++i) {
    auto part = std::make_unique<GroupedMatmulWork>(*this);
    part->part = i;
    AWQD_ASSIGN_OR_RETURN(part->x, ColumnsOf({x, x_dtype, rows}, weight.parts[i], staging));
    part->out_dtype = DType::kFp32;
    part->summed = false;
    part->router_weights.clear();
    part->activation = ActivationFunction::kNone;
    if (i > 0) part->bias.clear();  // the weights' own is with the first part too
    out.parts.push_back(std::move(part));
  }
  out.join = std::make_unique<PartsJoin>(SumShape{.count = y_rows(),
                                                  .cols = weight.shape.n,
                                                  .terms = summed ? top_k : 1,
                                                  .weights = router_weights,
                                                  .activation = activation,
                                                  .y_dtype = out_dtype},
                                         out.parts.size());
  return out;
}

absl::Status GroupedMatmulWork::Compute(Lane& lane, const RoutedTokens& routed, char* y,
                                        ExecutionReport* report) const {
  const int64_t n = last().n;
  AWQD_ASSIGN_OR_RETURN(void* sums, lane.Scratch(kSumsSlot, routed.x.rows * n * 4));
  ExpertProduct product = {.stack = stack.get(),
                           .part = part,
                           .x = routed.x,
                           .y = {sums, DType::kFp32, routed.x.rows, n},
                           .ends = routed.ends,
                           .activation = activation,
                           .path = path};
  if (!bias.empty()) {
    AWQD_ASSIGN_OR_RETURN(const void* there, lane.Upload(bias.data(), bias.size() * 4));
    product.bias = static_cast<const float*>(there);
  }
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  return Combine(lane, routed, sums, y);
}

}  // namespace awqd::engine
