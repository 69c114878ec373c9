// The products of a mixture of experts: each token with the weights of the experts chosen for it.
#pragma once

#include <memory>
#include <vector>

#include "server/engine/routed_work.h"

namespace awqd::engine {

// With router weights y[t] = sum over j of w[t, j] * y[t, j], else every y[t, j] is a row:
// y[t, j] = activation(x[t] @ W[ids[t, j]] (+ bias[ids[t, j]])), which stays FP32 until it was
// summed. tokens() counts rows: tokens x top_k.
class GroupedMatmulWork final : public RoutedWork {
 public:
  std::shared_ptr<const model::WeightStack> stack;
  std::vector<float> bias;  // [experts, N] override, or empty for the weights' own

  absl::string_view name() const override { return "GroupedQuantizedMatmul"; }
  // One speaks for all: they lie on the same devices.
  absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const override {
    return {stack->experts.data(), 1};
  }
  // Same stack, element types, activation function, top_k, asked-for path, and whether rows are
  // summed. A bias of the request's own keeps it alone.
  batching::BatchKey merge_key() const override;
  bool cut() const override { return stack->cut() || stack->spread(); }
  // At columns, where they are cut; at shares; or at rows of the weights (the down projections of
  // gated MLPs): the parts of a row of y are then summed in their order before the activation
  // function.
  absl::StatusOr<WorkCut> Cut(StagingPool& staging) const override;

 protected:
  const WeightShape& first() const override { return here().shape; }
  const WeightShape& last() const override { return here().shape; }
  int64_t experts() const override { return static_cast<int64_t>(stack->experts.size()); }
  double row_cost() const override;
  absl::Status Compute(Lane& lane, const RoutedTokens& routed, char* y,
                       ExecutionReport* report) const override;

 private:
  absl::StatusOr<WorkCut> CutAtRows(StagingPool& staging) const;
  // Columns of the bias, of some experts.
  std::vector<float> BiasOf(absl::Span<const int64_t> which, model::ColumnSpan columns) const;

  const DeviceWeight& here() const { return *stack->experts.front()->parts[part].weight; }
};

}  // namespace awqd::engine
