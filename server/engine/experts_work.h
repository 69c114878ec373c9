// GroupedMatmulWork: the products of a mixture of experts, each token with the weights of the
// experts chosen for it; the grouped product as a step of other works; and GatedMlpWork: a gated
// MLP in one work, y = down(activation(gate(x)) * up(x)) (exact.h), dense or of experts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "kernels/kernels.h"
#include "server/engine/routed_work.h"

namespace awqd::engine {

// With router weights y[t] = sum over j of w[t, j] * y[t, j], else every y[t, j] is a row:
// y[t, j] = activation(x[t] @ W[ids[t, j]] (+ bias[ids[t, j]])), which stays FP32 until it was
// summed. tokens() counts rows: tokens x top_k.
class GroupedMatmulWork final : public RoutedWork {
 public:
  std::shared_ptr<const model::WeightStack> stack;
  std::vector<float> bias;  // [experts, N] override, or empty for the weights' own
  Rounding rounding;        // of x

  absl::string_view name() const override { return "GroupedQuantizedMatmul"; }
  // The first stands for all: they are on the same devices.
  absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const override {
    return {stack->experts.data(), 1};
  }
  // Same stack, element types, activation function, rounding, top_k, asked-for path, and whether
  // rows are summed. A bias or scales of the request's own keep it alone.
  batching::BatchKey merge_key() const override {
    if (!bias.empty() || rounding.from_request) return {};
    return {&here(), variant({&rounding})};
  }
  bool partitioned() const override { return stack->partitioned() || stack->expert_parallel(); }
  // By columns; by experts; or by rows of the weights (the down projections of gated MLPs): then
  // the partial sums of a row of y are added in the order of the parts before the activation
  // function.
  absl::StatusOr<WorkPartition> Partition(StagingPool& staging) const override;
  // Where weights are partitioned at rows: `reduction` has what becomes of the sums of all rows.
  absl::StatusOr<WorkPartition> PartitionAtRows(const Reduction& reduction,
                                                StagingPool& staging) const;

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
  const DeviceWeight& here() const { return *stack->experts.front()->parts[part].weight; }
};

// --- The grouped product as a step: from device memory to device memory ---

// A Rounding of rows on a device.
struct RowRounding {
  ActivationQuantization how = ActivationQuantization::kNone;
  // FP32 [rows], where HasGivenScales; of E4M3 x with kFloat8PerBlock [rows, each].
  const float* scales = nullptr;
  int64_t each = 1;

  friend bool operator==(const RowRounding&, const RowRounding&) = default;
};

// y = activation(x @ W + bias), the rows of each expert with its own weight.
struct ExpertProduct {
  const model::WeightStack* stack = nullptr;
  // A second stack of the same shape, which multiplies the same rows; they follow in y. Null: none.
  const model::WeightStack* also = nullptr;
  size_t part = 0;  // Work::part
  ConstMatrixView x;
  // FP32 [rows], the factors of the sums of each row; for IsOneKernel alone.
  const float* x_scale = nullptr;
  RowRounding rounding, also_rounding;  // of x for `stack`, and for `also`
  // For IsOneKernel with a rounding, on GPUs (GroupedArgs): the rows of x, or what they are instead.
  const int32_t* gather = nullptr;
  std::optional<GateArgs> gate;
  float sums_factor = 1;
  MatrixView y;
  absl::Span<const int64_t> ends;
  // FP32 [experts, N] on the device, then those of `also`; null: the weights' own.
  const float* bias = nullptr;
  ActivationFunction activation = ActivationFunction::kNone;
  std::optional<Path> path;

  int64_t rows() const { return ends.empty() ? 0 : ends.back(); }
};

// Lists that were uploaded; on the CPU kernels read them here until Fetch.
using UploadedLists = std::vector<std::vector<float>>;

// Whether one kernel computes all of these products.
bool IsOneKernel(const ExpertProduct& product);

// Enqueues the products of the experts that have rows, and adds their kernels to `report`.
absl::Status RunExperts(Lane& lane, const ExpertProduct& product, ExecutionReport* report);

// --- A gated MLP ---

// Values between the products stay on the device, in FP32; many rows of experts have 16 bits on
// GPUs. Without ids the stacks have one weight each; with ids each chosen expert computes its own
// MLP, and the rows are summed by the router's weights, if there are any, after the last product.
// A shared expert multiplies every token, and its row is added to the sum. tokens() counts rows:
// tokens x top_k.
class GatedMlpWork final : public RoutedWork {
 public:
  // gate and up [K, I], down [I, N], of as many experts each; and how what they multiply is rounded.
  struct Stacks {
    std::shared_ptr<const model::WeightStack> gate, up, down;
    Rounding of_gate = {}, of_up = {}, of_down = {};
  };

  GatedMlpWork(std::shared_ptr<const model::WeightStack> gate,
               std::shared_ptr<const model::WeightStack> up,
               std::shared_ptr<const model::WeightStack> down)
      : GatedMlpWork({std::move(gate), std::move(up), std::move(down)}, {}) {}
  // `shared`: of one weight each, K and N as those of the experts; null: there is none. Rows are
  // summed where there is one.
  GatedMlpWork(Stacks mlp, Stacks shared) : mlp_(std::move(mlp)), shared_(std::move(shared)) {
    for (const Stacks* stacks : {&mlp_, &shared_}) {
      if (stacks->gate == nullptr) continue;
      for (const auto* stack : {&stacks->gate, &stacks->up, &stacks->down}) {
        first_experts_.push_back((*stack)->experts.front());
      }
    }
  }

  GateParameters parameters;
  // Overrides, or empty for the weights' own: those of gate and then of up [2, experts, I], and of
  // down [experts, N].
  std::vector<float> gate_up_bias, down_bias;

  absl::string_view name() const override { return "GatedMlp"; }
  absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const override {
    return first_experts_;
  }
  int64_t bytes() const override {
    return RoutedWork::bytes() +
           static_cast<int64_t>((gate_up_bias.size() + down_bias.size()) * sizeof(float));
  }
  int64_t cost() const override;
  // Same stacks, element types, activation function with its constants, roundings, top_k, asked-for
  // path, and whether rows are summed and a shared expert is gated. A bias or scales of the
  // request's own keep it alone.
  batching::BatchKey merge_key() const override;
  bool partitioned() const override;
  // By experts; or tensor parallel: each device has some columns of gate and of up and the same
  // rows of down, and the partial sums of a token are added in the order of the devices.
  // Rows that enter down by one scale of a token come from all devices before they are rounded.
  // FAILED_PRECONDITION or UNIMPLEMENTED where the three are not partitioned alike.
  absl::StatusOr<WorkPartition> Partition(StagingPool& staging) const override;

 protected:
  const WeightShape& first() const override { return Here(*mlp_.gate).shape; }
  const WeightShape& last() const override {
    return Here(ends_in_middle_ ? *mlp_.gate : *mlp_.down).shape;
  }
  int64_t experts() const override { return static_cast<int64_t>(mlp_.gate->experts.size()); }
  double row_cost() const override { return RowCost(mlp_); }
  bool MayNarrow(int64_t rows) const override;
  bool GathersTokens(const RoutedTokens& routed) const override;
  absl::Status Compute(Lane& lane, const RoutedTokens& routed, char* y,
                       ExecutionReport* report) const override;

 private:
  double RowCost(const Stacks& stacks) const {
    const WeightShape& in = Here(*stacks.gate).shape;
    return static_cast<double>(in.n) * static_cast<double>(2 * in.k + Here(*stacks.down).shape.n);
  }
  // `begin`: of the three in first_experts_.
  absl::Status CheckPartitionedAlike(size_t begin) const;
  // Each part of the experts has a part of the shared expert beside it.
  absl::Status CheckSharedPartitioned() const;
  // The shared expert as a work of its own, or null: FP32 rows, times their gate.
  std::unique_ptr<GatedMlpWork> MakeSharedPart() const;
  // A part that computes some columns of gate and up, out_dtype FP32.
  std::unique_ptr<GatedMlpWork> MakeColumns(model::ColumnSpan columns) const;
  // In stages: the middle of all devices, then down from it; the shared expert's first.
  absl::StatusOr<WorkPartition> PartitionInStages(StagingPool& staging) const;
  WorkPartition PartitionMiddle() const;
  absl::StatusOr<WorkPartition> PartitionDown(const Reduction& reduction, Payload middle,
                                              StagingPool& staging) const;
  // FP32 [tokens], as GateTokens has them; empty without a gate.
  std::vector<float> ComputeSharedWeights() const;
  // MayNarrow, and kernels take such rows: gate and up, and the rows that are combined, then have
  // 16 bits, as x and y have.
  bool Narrows(const RoutedTokens& routed, ExpertProduct product) const;
  // Enqueues gate and up of `product`, which has all but the stacks, roundings and y. The rows of
  // gate come first in y. `scales`: of E4M3 rows of x.
  absl::Status RunGateAndUp(Lane& lane, const Stacks& stacks, absl::Span<const float> scales,
                            DType dtype, ExpertProduct* product, UploadedLists* lists,
                            ExecutionReport* report) const;
  // The same, and GateFloat of them. `product` then is that of down without y. `sums_factor`: what
  // the sums of down are to be multiplied by.
  absl::Status RunToDown(Lane& lane, const Stacks& stacks, absl::Span<const float> scales,
                         DType dtype, float sums_factor, ExpertProduct* product,
                         UploadedLists* lists, ExecutionReport* report) const;
  // Enqueues the shared expert of all tokens; returns its rows, FP32 [tokens, N].
  absl::StatusOr<const float*> RunShared(Lane& lane, const RoutedTokens& routed,
                                         UploadedLists* lists, ExecutionReport* report) const;
  // GateFloat of gate and up. `both`: the rows of gate, then those of up.
  GateArgs GateOf(const MatrixView& both) const;
  // Enqueues GateFloat(gate, up), and makes it the activations of `down`.
  absl::Status MultiplyGate(Lane& lane, const MatrixView& both, float sums_factor,
                            ExpertProduct* down) const;

  const DeviceWeight& Here(const model::WeightStack& stack) const {
    return *stack.experts.front()->parts[part].weight;
  }

  Stacks mlp_, shared_;
  // A part whose result is what enters down, FP32 [choices, I].
  bool ends_in_middle_ = false;
  // The first of each stack; all experts of a stack are on the same devices.
  absl::InlinedVector<std::shared_ptr<const model::PlacedWeight>, 6> first_experts_;
};

}  // namespace awqd::engine
