// RoutedWork: the base of works of experts. It sorts tokens by the experts that multiply them, and
// partitions a work among devices that have different experts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "server/engine/work.h"
#include "server/model/placed_weight.h"

namespace awqd::engine {

// A *row* is one choice of a token: its activations times the weight of one expert. Rows of one
// expert lie together, in the order of their tokens.
struct ExpertOrder {
  std::vector<int64_t> ends;    // [experts]: where the rows of each end
  std::vector<int32_t> tokens;  // [rows]: the token of each row
  std::vector<int32_t> rows;    // [tokens * top_k]: the row of each choice
};

// `ids`: the expert of each choice, in [0, experts). `tokens`: the token of each choice; empty:
// choice i is of token i / top_k.
ExpertOrder SortByExpert(absl::Span<const int32_t> ids, int64_t top_k, int64_t experts,
                         absl::Span<const int32_t> tokens = {});

// How activations are rounded to E4M3 before a product (kernels/steps.h).
struct Rounding {
  ActivationQuantization how = ActivationQuantization::kNone;  // kNone, or one of E4M3
  std::vector<float> scales;  // where HasGivenScales: one for all rows, or one for each expert
  bool from_request = false;  // the scales are a request's, not the weights'

  friend bool operator==(const Rounding&, const Rounding&) = default;
};

// Tokens on a lane's device, in the order of their experts.
struct RoutedTokens {
  ConstMatrixView x;                 // [rows, K]; no data where GathersTokens
  const int32_t* sources = nullptr;  // int32 [rows]: the token of each row
  absl::Span<const int64_t> ends;    // of each expert's rows
  const int32_t* rows = nullptr;     // int32 [tokens, top_k]; null: row i is token i
  const float* weights = nullptr;    // FP32 [tokens, top_k], the router's; null: not summed
  ConstMatrixView tokens;            // [tokens, K], x in the order of the tokens
  // FP32 [tokens]: the weight of the shared expert's row; null: 1.
  const float* shared_weights = nullptr;
  const float* factors =
      nullptr;  // FP32 [rows], kNarrowFactor; null: not FP16, or MayNarrow is false
  // token_scales of each row, and of each token, in host memory; else empty.
  absl::Span<const float> scales, scales_of_tokens;
};

// Tokens that experts multiply, or that all go to one weight.
class RoutedWork : public Work {
 public:
  Payload x;  // rows x K of x_dtype, from Engine::staging
  DType x_dtype = DType::kFp16;
  DType out_dtype = DType::kFp16;
  int64_t rows = 0;  // tokens
  int64_t top_k = 1;
  // These two name the operation, whatever the number of tokens: ids choose an expert for each row,
  // and router_weights sum the rows of a token. Works that merge agree in both.
  bool of_experts = false;
  bool summed = false;
  std::vector<int32_t> ids;  // [choices] of_experts, else empty
  // Only in a part, which has some choices of its tokens: the token of each choice, ascending;
  // top_k is 1, and nothing is summed. Empty: choice i is of token i / top_k.
  std::vector<int32_t> choice_tokens;
  std::vector<float> router_weights;  // [rows, top_k] if summed, else empty
  // The scales of each token's E4M3 numbers, where x is E4M3 and in parts: [rows], or with
  // kFloat8PerBlock [rows, ceil(K / 128)]. Else empty.
  std::vector<float> token_scales;
  // [K]: the shared expert's row of a token is multiplied by sigmoid(x . gate). Empty: by 1.
  std::vector<float> shared_expert_gate;
  std::optional<Path> path;  // none: the token-count policy decides, for each expert
  ActivationFunction activation = ActivationFunction::kNone;

  int64_t choices() const {
    return choice_tokens.empty() ? rows * top_k : static_cast<int64_t>(choice_tokens.size());
  }
  int64_t tokens() const override { return choices(); }
  int64_t bytes() const override {
    return x.size() +
           static_cast<int64_t>((ids.size() + choice_tokens.size() + router_weights.size() +
                                 token_scales.size() + shared_expert_gate.size()) *
                                4);
  }
  int64_t result_bytes() const override { return y_rows() * last().n * SizeOf(out_dtype); }
  bool accesses_devices() const override { return !partitioned(); }
  int64_t cost() const override {
    return CostOfMultiplications(static_cast<double>(tokens()) * row_cost());
  }
  void FreeInputs() override { x = Payload(); }
  absl::Status Run(Lane& lane, const batching::Batch& batch, char* result,
                   ExecutionReport* report) const final;

 protected:
  // The shapes of the first and of the last weight.
  virtual const WeightShape& first() const = 0;
  virtual const WeightShape& last() const = 0;
  virtual int64_t experts() const = 0;
  int64_t y_rows() const { return summed ? rows : choices(); }
  // The number of token_scales of a token.
  int64_t scales_each() const {
    return rows == 0 ? 0 : static_cast<int64_t>(token_scales.size()) / rows;
  }
  // The multiplications of a row.
  virtual double row_cost() const = 0;
  // Works with equal variants may merge, if they have the same weights. It holds every field that
  // the run of a batch reads from its first work alone; all other fields are read from each work.
  // `roundings`: of each product, up to 6.
  uint64_t variant(absl::Span<const Rounding* const> roundings) const;

  // Whether so many rows may have 16 bits between products (kNarrowRows).
  virtual bool MayNarrow(int64_t /*rows*/) const { return false; }

  // Whether Compute takes `tokens` and `sources` instead of x.
  virtual bool GathersTokens(const RoutedTokens& /*routed*/) const { return false; }

  // Enqueues everything, from these tokens to `y`, and fetches it.
  virtual absl::Status Compute(Lane& lane, const RoutedTokens& routed, char* y,
                               ExecutionReport* report) const = 0;

  // Partitions by the shards of an expert-parallel stack: each choice goes to the device that has
  // its expert. `make` makes a copy of this work on one of the shards. `shared`: another part, whose
  // rows, FP32 [rows, N], are added to the sums; null: none.
  absl::StatusOr<WorkPartition> PartitionExperts(
      const model::WeightStack& stack, StagingPool& staging,
      absl::FunctionRef<std::unique_ptr<RoutedWork>(size_t shard)> make,
      std::unique_ptr<RoutedWork> shared = nullptr) const;

  // The device that holds the weights, for steps between their products.
  Device& step_device() const { return *weights().front()->parts[part].weight->device; }

  // The last step: combines rows [rows, N] of the last product into y, and fetches it. `shared`:
  // FP32 [tokens, N], the shared expert's rows, or null.
  absl::Status CombineAndFetch(Lane& lane, const RoutedTokens& routed, const MatrixView& sums,
                               const float* shared, char* y) const;

 private:
  struct Piece;

  absl::Status RunPieces(Lane& lane, absl::Span<const Piece> pieces, char* y,
                         ExecutionReport* report) const;
  // Enqueues the weights of the shared expert's rows.
  absl::Status GateShared(Lane& lane, absl::Span<const Piece> pieces, RoutedTokens* routed) const;
  // This work alone, some rows at a time, so that the lane's buffers stay bounded.
  absl::Status RunWorkInSteps(Lane& lane, char* y, ExecutionReport* report) const;
};

}  // namespace awqd::engine
