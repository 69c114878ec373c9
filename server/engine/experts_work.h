// GroupedMatmulWork: the products of a mixture of experts, each token with the weights of the
// experts chosen for it; the grouped product as a step of other works; and GatedMlpWork: a gated
// MLP in one work, y = down(activation(gate(x)) * up(x)), dense or of experts.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
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
  // The first stands for all: they are on the same devices.
  absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const override {
    return {stack->experts.data(), 1};
  }
  // Same stack, element types, activation function, top_k, asked-for path, and whether rows are
  // summed. A bias of the request's own keeps it alone.
  batching::BatchKey merge_key() const override {
    if (!bias.empty()) return {};
    return {&here(), variant()};
  }
  bool partitioned() const override { return stack->partitioned() || stack->expert_parallel(); }
  // By columns; by experts; or by rows of the weights (the down projections of gated MLPs): then
  // the partial sums of a row of y are added in the order of the parts before the activation
  // function.
  absl::StatusOr<WorkPartition> Partition(StagingPool& staging) const override;

 protected:
  const WeightShape& first() const override { return here().shape; }
  const WeightShape& last() const override { return here().shape; }
  int64_t experts() const override { return static_cast<int64_t>(stack->experts.size()); }
  double row_cost() const override {
    return static_cast<double>(here().shape.k) * static_cast<double>(here().shape.n);
  }
  absl::Status Compute(Lane& lane, const RoutedTokens& routed, char* y,
                       ExecutionReport* report) const override;

 private:
  absl::StatusOr<WorkPartition> PartitionAtRows(StagingPool& staging) const;
  // Copies some columns of the bias of some experts.
  std::vector<float> CopyBias(absl::Span<const int64_t> which, model::ColumnSpan columns) const;

  const DeviceWeight& here() const { return *stack->experts.front()->parts[part].weight; }
};

// --- The grouped product as a step: from device memory to device memory ---

// y = activation(x @ W + bias), the rows of each expert with its own weight.
struct ExpertProduct {
  const model::WeightStack* stack = nullptr;
  // A second stack of the same shape, which multiplies the same rows; they follow in y. Null: none.
  const model::WeightStack* also = nullptr;
  size_t part = 0;  // Work::part
  ConstMatrixView x;
  // FP32 [rows], the factors of the sums of each row; for IsOneKernel alone.
  const float* x_scale = nullptr;
  MatrixView y;
  absl::Span<const int64_t> ends;
  const float* bias = nullptr;  // FP32 [experts, N] on the device; null: the weights' own
  ActivationFunction activation = ActivationFunction::kNone;
  std::optional<Path> path;
};

// Whether one kernel computes all of these products.
bool IsOneKernel(const ExpertProduct& product);

// Enqueues the products of the experts that have rows, and adds their kernels to `report`.
absl::Status RunExperts(Lane& lane, const ExpertProduct& product, ExecutionReport* report);

// --- A gated MLP ---

// Values between the products stay on the device, in FP32; many rows of experts have 16 bits on
// GPUs. Without ids the stacks have one weight each; with ids each chosen expert computes its own
// MLP, and the rows are summed by the router's weights, if there are any, after the last product.
// tokens() counts rows: tokens x top_k.
class GatedMlpWork final : public RoutedWork {
 public:
  // gate and up [K, I], down [I, N], of as many experts each.
  GatedMlpWork(std::shared_ptr<const model::WeightStack> gate,
               std::shared_ptr<const model::WeightStack> up,
               std::shared_ptr<const model::WeightStack> down)
      : gate_(std::move(gate)),
        up_(std::move(up)),
        down_(std::move(down)),
        first_experts_{gate_->experts.front(), up_->experts.front(), down_->experts.front()} {}

  absl::string_view name() const override { return "GatedMlp"; }
  absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const override {
    return first_experts_;
  }
  // Same three stacks, element types, activation function, top_k, asked-for path, and whether rows
  // are summed.
  batching::BatchKey merge_key() const override {
    return {
        .subject = &Here(*gate_), .variant = variant(), .further = {&Here(*up_), &Here(*down_)}};
  }
  bool partitioned() const override;
  // By experts; or tensor parallel: each device has some columns of gate and of up and the same
  // rows of down, and the partial sums of a token are added in the order of the devices.
  // FAILED_PRECONDITION or UNIMPLEMENTED where the three are not partitioned alike.
  absl::StatusOr<WorkPartition> Partition(StagingPool& staging) const override;

 protected:
  const WeightShape& first() const override { return Here(*gate_).shape; }
  const WeightShape& last() const override { return Here(*down_).shape; }
  int64_t experts() const override { return static_cast<int64_t>(gate_->experts.size()); }
  double row_cost() const override {
    const WeightShape& in = first();
    return static_cast<double>(in.n) * static_cast<double>(2 * in.k + last().n);
  }
  bool MayNarrow(int64_t rows) const override;
  absl::Status Compute(Lane& lane, const RoutedTokens& routed, char* y,
                       ExecutionReport* report) const override;

 private:
  absl::Status CheckPartitionedAlike() const;
  // MayNarrow, and kernels take such rows: gate and up, and the rows that are combined, then have
  // 16 bits, as x and y have.
  bool Narrows(const RoutedTokens& routed, ExpertProduct product) const;
  // Enqueues activation(gate) * up, and makes it the activations of `down`. `both`: the rows of
  // gate, then those of up. `sums_factor`: what the sums of `down` are to be multiplied by.
  absl::Status MultiplyGate(Lane& lane, const MatrixView& both, float sums_factor,
                            ExpertProduct* down) const;

  const DeviceWeight& Here(const model::WeightStack& stack) const {
    return *stack.experts.front()->parts[part].weight;
  }

  std::shared_ptr<const model::WeightStack> gate_, up_, down_;
  // The first of each stack; all experts of a stack are on the same devices.
  std::array<std::shared_ptr<const model::PlacedWeight>, 3> first_experts_;
};

}  // namespace awqd::engine
