// DequantizeWork: a block of a weight, decoded.
#pragma once

#include <cstdint>
#include <memory>

#include "server/engine/work.h"

namespace awqd::engine {

// out[rows, cols] of the weight. Never merges; it has no rows of activations, so no tokens.
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
  // A row costs about as much to decode as to multiply.
  int64_t load() const override { return rows; }
  // By columns or by rows, as the weight is.
  absl::StatusOr<WorkPartition> Partition(StagingPool& staging) const override;
  absl::Status Run(Lane& lane, const batching::Batch& batch, char* result,
                   ExecutionReport* report) const override;

 private:
  WorkPartition PartitionAtRows() const;
};

}  // namespace awqd::engine
