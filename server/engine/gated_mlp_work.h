// GatedMlpWork: a gated MLP in one work, y = down(activation(gate(x)) * up(x)), dense or of
// experts.
#pragma once

#include <array>
#include <memory>

#include "server/engine/grouped_matmul_work.h"

namespace awqd::engine {

// Values between the products stay on the device, in FP32. Without ids the stacks have one
// weight each; with ids each chosen expert computes its own MLP, and the rows are summed by the
// router's weights, if there are any, after the last product. tokens() counts rows: tokens x top_k.
class GatedMlpWork final : public RoutedWork {
 public:
  // gate and up [K, I], down [I, N], of as many experts each.
  GatedMlpWork(std::shared_ptr<const model::WeightStack> gate,
               std::shared_ptr<const model::WeightStack> up,
               std::shared_ptr<const model::WeightStack> down);

  absl::string_view name() const override { return "GatedMlp"; }
  absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const override {
    return first_experts_;
  }
  // Same three stacks, element types, activation function, top_k, asked-for path, and whether rows
  // are summed.
  batching::BatchKey merge_key() const override;
  bool partitioned() const override;
  // By experts; or tensor parallel: each device has some columns of gate and of up and the same
  // rows of down, and the partial sums of a token are added in the order of the devices.
  // FAILED_PRECONDITION or UNIMPLEMENTED where the three are not partitioned alike.
  absl::StatusOr<WorkPartition> Partition(StagingPool& staging) const override;

 protected:
  const WeightShape& first() const override { return Here(*gate_).shape; }
  const WeightShape& last() const override { return Here(*down_).shape; }
  int64_t experts() const override { return static_cast<int64_t>(gate_->experts.size()); }
  double row_cost() const override;
  absl::Status Compute(Lane& lane, const RoutedTokens& routed, char* y,
                       ExecutionReport* report) const override;

 private:
  absl::Status CheckPartitionedAlike() const;
  // Enqueues activation(gate) * up, and makes it the activations of `down`. `both`: the rows of
  // gate, then those of up.
  absl::Status MultiplyGate(Lane& lane, float* both, int64_t rows, ExpertProduct* down) const;

  const DeviceWeight& Here(const model::WeightStack& stack) const {
    return *stack.experts.front()->parts[part].weight;
  }

  std::shared_ptr<const model::WeightStack> gate_, up_, down_;
  // The first of each stack; all experts of a stack are on the same devices.
  std::array<std::shared_ptr<const model::PlacedWeight>, 3> first_experts_;
};

}  // namespace awqd::engine
