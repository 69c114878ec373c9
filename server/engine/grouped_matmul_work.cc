// GroupedMatmulWork: one product for each expert that has rows, then each token's rows together.
#include "server/engine/grouped_matmul_work.h"

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

absl::StatusOr<WorkCut> GroupedMatmulWork::Cut() const {
  const model::PlacedWeight& weight = *stack->experts.front();
  const int64_t n = weight.shape.n;
  const int64_t y_rows = router_weights.empty() ? rows * top_k : rows;
  return CutAtColumns({weight, {0, n}, y_rows, SizeOf(out_dtype)},
                      [&](size_t, model::ColumnSpan columns) {
                        auto out = std::make_unique<GroupedMatmulWork>(*this);
                        out->bias.clear();
                        for (int64_t e = 0; !bias.empty() && e < experts(); ++e) {
                          out->bias.insert(out->bias.end(), bias.begin() + e * n + columns.begin,
                                           bias.begin() + e * n + columns.end);
                        }
                        return out;
                      });
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
