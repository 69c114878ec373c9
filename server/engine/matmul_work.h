// MatmulWork and DequantizeWork: the operations on one weight; and the product as a step of other
// works.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "server/engine/work.h"

namespace awqd {
struct MatmulArgs;
}

namespace awqd::engine {

struct RowPiece;

inline constexpr int64_t kScaledBlock = 128;  // in-features that share a scale of E4M3 numbers

// y[rows, N] = activation(x[rows, K] @ W (+ bias)); a row is a token. With quantised activations
// activation(a * (q @ W) (+ bias)).
class MatmulWork final : public Work {
 public:
  std::shared_ptr<const model::PlacedWeight> weight;
  Payload x;  // rows x K of x_dtype, from Engine::staging
  DType x_dtype = DType::kFp16;
  DType out_dtype = DType::kFp16;
  int64_t rows = 0;
  std::vector<float> bias;   // [N] override, or empty for the weight's own
  std::optional<Path> path;  // none: the token-count policy decides
  ActivationFunction activation = ActivationFunction::kNone;
  // Floating x is rounded to 8 bits first; kNone for x that is INT8, as in MatmulArgs for E4M3.
  ActivationQuantization quantization = ActivationQuantization::kNone;
  // For INT8 x with a floating result, and where HasGivenScales: one for each row, or one for all.
  // For E4M3 x with kFloat8PerBlock [rows, ceil(K / 128)]. Else empty.
  std::vector<float> scales;

  const DeviceWeight& here() const { return *weight->parts[part].weight; }

  absl::string_view name() const override { return "QuantizedMatmul"; }
  absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const override {
    return {&weight, 1};
  }
  int64_t tokens() const override { return rows; }
  int64_t bytes() const override {
    return x.size() + static_cast<int64_t>((bias.size() + scales.size()) * sizeof(float));
  }
  int64_t result_bytes() const override { return rows * here().shape.n * SizeOf(out_dtype); }
  bool accesses_devices() const override { return !partitioned(); }
  int64_t cost() const override;
  // Same weight, element types, activation function, quantisation and asked-for path; scales may
  // differ, because in a batch every token has its own. A bias of the request's own keeps it alone.
  batching::BatchKey merge_key() const override;
  // By columns; or by rows of the weight (the down projections of gated MLPs): then the partial
  // sums of a row of y are added in the order of the parts before the activation function.
  absl::StatusOr<WorkPartition> Partition(StagingPool& staging) const override;
  absl::Status Run(Lane& lane, const batching::Batch& batch, char* result,
                   ExecutionReport* report) const override;
  void FreeInputs() override { x = Payload(); }

 private:
  absl::StatusOr<WorkPartition> PartitionAtRows(StagingPool& staging) const;
  // Multiplies these rows at once. `token_scales`: one for each row, or none. `y`: staging memory
  // for as many rows of N.
  absl::Status Multiply(Lane& lane, absl::Span<const RowPiece> pieces,
                        absl::Span<const float> token_scales, Path taken, char* y,
                        ExecutionReport* report) const;
  // Whether each row of x has a scale of the request's, whatever the number of rows.
  bool has_row_scales() const;
  // Whether each block of 128 of a row has one.
  bool has_block_scales() const;
  // Adds the scale of each row.
  void AppendScales(std::vector<float>* out) const;
};

// out[rows, cols] of the W that activations are multiplied by as they are sent: a weight's factor
// and transform are in it. Never merges; it has no rows of activations, so no tokens.
class DequantizeWork final : public Work {
 public:
  std::shared_ptr<const model::PlacedWeight> weight;
  DType out_dtype = DType::kFp16;
  int64_t row_begin = 0, rows = 0;
  int64_t col_begin = 0, cols = 0;

  absl::string_view name() const override { return "Dequantize"; }
  absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const override {
    return {&weight, 1};
  }
  int64_t tokens() const override { return 0; }
  int64_t bytes() const override { return 0; }
  int64_t result_bytes() const override { return rows * cols * SizeOf(out_dtype); }
  // A factor and a transform of activations change decoded weights on the host.
  bool accesses_devices() const override;
  // A row costs about as much to decode as to multiply.
  int64_t load() const override { return rows; }
  // By columns or by rows, as the weight is.
  absl::StatusOr<WorkPartition> Partition(StagingPool& staging) const override;
  absl::Status Run(Lane& lane, const batching::Batch& batch, char* result,
                   ExecutionReport* report) const override;

 private:
  struct Block {
    int64_t row_begin = 0, rows = 0;
    int64_t col_begin = 0, cols = 0;
  };
  // Decodes a block as it is stored into host memory. Returns the kernel.
  absl::StatusOr<const KernelRow*> Decode(Lane& lane, DType dtype, const Block& block,
                                          void* host) const;
  absl::Status RunTransformed(Lane& lane, char* result, ExecutionReport* report) const;
};

// --- The product as a step: from device memory to device memory ---

// The path of a product of so many tokens, by the token-count policy.
Path ChoosePath(const Lane& lane, const DeviceWeight& weight, int64_t tokens,
                ActivationQuantization quantization);

// The scale of each token's numbers of 8 bits, as the prologue computes it (kernels/steps.h).
// `most`: the largest of them.
std::vector<float> ComputeTokenScales(const Activations& activations, float most);

// From scales [rows, ceil(K / 128)] those of the columns of x that a part multiplies, which begins
// with a block.
std::vector<float> CopyBlockScales(absl::Span<const float> scales, int64_t rows,
                                   const model::PlacedWeight& weight, const model::WeightPart& of);

// Enqueues the product with the lane's workspace, and adds the kernel to `report`.
absl::Status RunProduct(Lane& lane, MatmulArgs args, Path path, ExecutionReport* report);

}  // namespace awqd::engine
