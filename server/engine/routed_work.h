// What the works of experts share: tokens sorted by the experts that multiply them, and the product
// of a stack of weights as a step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "server/engine/work.h"
#include "server/model/weight_stack.h"

namespace awqd::engine {

// A *row* is one choice of a token: its activations times the weight of one expert. Rows of one
// expert lie together, in the order of their tokens.
struct ExpertOrder {
  std::vector<int64_t> ends;    // [experts]: where the rows of each end
  std::vector<int32_t> tokens;  // [rows]: whose activations
  std::vector<int32_t> rows;    // [tokens * top_k]: the row of each choice
};

// `ids` of the choices, each in [0, experts). `tokens`: whose each is; empty: choice i is of token
// i / top_k.
ExpertOrder SortByExpert(absl::Span<const int32_t> ids, int64_t top_k, int64_t experts,
                         absl::Span<const int32_t> tokens = {});

// Tokens on a lane's device, in the order of their experts.
struct RoutedTokens {
  ConstMatrixView x;               // [rows, K]
  absl::Span<const int64_t> ends;  // of each expert's rows
  const int32_t* rows = nullptr;   // int32 [tokens, top_k]; null: row i is token i
  const float* weights = nullptr;  // FP32 [tokens, top_k], the router's; null: not summed
};

// Tokens that experts multiply, or that all go to one weight. The base of the works that do.
class RoutedWork : public Work {
 public:
  Payload x;  // rows x K of x_dtype, from Engine::staging
  DType x_dtype = DType::kFp16;
  DType out_dtype = DType::kFp16;
  int64_t rows = 0;  // tokens
  int64_t top_k = 1;
  // They say which operation this is, whatever the number of tokens: ids choose an expert for each
  // row, and router_weights sum the rows of a token. Works that merge agree in both.
  bool of_experts = false;
  bool summed = false;
  std::vector<int32_t> ids;  // [choices] of_experts, else empty
  // Of a part, which has some choices of its tokens: the token of each, ascending; top_k is 1, and
  // nothing is summed. Empty: choice i is of token i / top_k.
  std::vector<int32_t> choice_tokens;
  std::vector<float> router_weights;  // [rows, top_k] if summed, else empty
  std::optional<Path> path;           // none: the token-count policy decides, for each expert
  ActivationFunction activation = ActivationFunction::kNone;

  int64_t choices() const {
    return choice_tokens.empty() ? rows * top_k : static_cast<int64_t>(choice_tokens.size());
  }
  int64_t tokens() const override { return choices(); }
  int64_t bytes() const override;
  int64_t result_bytes() const override;
  int64_t cost() const override;
  void FreeInputs() override { x = Payload(); }
  absl::Status Run(Lane& lane, const batching::Batch& batch, char* result,
                   ExecutionReport* report) const final;

 protected:
  // The shape that goes in, and the one that comes out.
  virtual const WeightShape& first() const = 0;
  virtual const WeightShape& last() const = 0;
  virtual int64_t experts() const = 0;
  int64_t y_rows() const { return summed ? rows : choices(); }
  // Multiplications of a row.
  virtual double row_cost() const = 0;
  // Works with equal variants may merge, if they have the same weights. Holds everything that the
  // run of a batch asks of its first work; it asks the rest of each work.
  uint64_t variant() const;

  // Enqueues everything, from these tokens to `y`, staging memory, and fetches it.
  virtual absl::Status Compute(Lane& lane, const RoutedTokens& routed, char* y,
                               ExecutionReport* report) const = 0;

  // Cuts at the shares of a stack that is spread: each choice goes to the device that has its
  // expert. `make` makes a copy of this work on one of the shares.
  absl::StatusOr<WorkCut> CutAtShares(
      const model::WeightStack& stack, StagingPool& staging,
      absl::FunctionRef<std::unique_ptr<RoutedWork>(size_t share)> make) const;

  // The device that holds the weights, for steps between their products.
  Device& on() const { return *weights().front()->parts[part].weight->device; }

  // The last step: FP32 rows [rows, N] of the last product become y. Fetches it.
  absl::Status Combine(Lane& lane, const RoutedTokens& routed, const void* sums, char* y) const;

 private:
  struct Piece;

  absl::Status RunPieces(Lane& lane, absl::Span<const Piece> pieces, char* y,
                         ExecutionReport* report) const;
  // This work alone, some rows at a time, so that the lane's buffers stay bounded.
  absl::Status RunInSteps(Lane& lane, char* y, ExecutionReport* report) const;
  absl::Status RunChoicesInSteps(Lane& lane, char* y, ExecutionReport* report) const;
};

// y = activation(x @ W + bias), the rows of each expert with its own weight.
struct ExpertProduct {
  const model::WeightStack* stack = nullptr;
  // A second stack of the same shape, which multiplies the same rows; they follow in y. Null: none.
  const model::WeightStack* also = nullptr;
  size_t part = 0;  // Work::part
  ConstMatrixView x;
  // FP32 [rows], what the sums of each row are multiplied by; for RunsAtOnce alone.
  const float* x_scale = nullptr;
  MatrixView y;
  absl::Span<const int64_t> ends;
  const float* bias = nullptr;  // FP32 [experts, N] on the device; null: the weights' own
  ActivationFunction activation = ActivationFunction::kNone;
  std::optional<Path> path;
};

// Whether one kernel takes all of these products.
bool RunsAtOnce(const ExpertProduct& product);

// Enqueues the products of the experts that have rows, and adds their kernels to `report`.
absl::Status RunExperts(Lane& lane, const ExpertProduct& product, ExecutionReport* report);

}  // namespace awqd::engine
