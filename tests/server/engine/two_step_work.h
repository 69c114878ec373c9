// TwoStepWork: y = (x @ A + a) @ B + b, in FP32, as one work. The intermediate result stays on the
// device.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"
#include "server/engine/matmul_work.h"
#include "server/engine/reassembly.h"

namespace awqd::engine {

class TwoStepWork final : public Work {
 public:
  std::vector<std::shared_ptr<const model::PlacedWeight>> both;  // A, B
  Payload x;                                                     // rows x K of A, FP32
  int64_t rows = 0;
  std::vector<float> a, b;  // the request's own biases; with one it runs alone
  std::atomic<int>* runs = nullptr;

  absl::string_view name() const override { return "TwoStep"; }
  absl::Span<const std::shared_ptr<const model::PlacedWeight>> weights() const override {
    return both;
  }
  int64_t tokens() const override { return rows; }
  int64_t bytes() const override { return x.size(); }
  int64_t result_bytes() const override { return rows * Here(1).shape.n * 4; }
  batching::BatchKey merge_key() const override {
    if (!a.empty() || !b.empty()) return {};
    return {&Here(0), static_cast<uint32_t>(DType::kFp32) << 8 |
                          static_cast<uint32_t>(DType::kFp32)};  // like a product with A
  }
  void FreeInputs() override { x = Payload(); }

  // Every device multiplies with the whole of A and with its own columns of B.
  absl::StatusOr<WorkPartition> Partition(StagingPool& staging) const override {
    if (both[0]->partitioned()) return Work::Partition(staging);
    const model::PlacedWeight& second = *both[1];
    return PartitionColumns({second, {0, second.shape.n}, rows, 4},
                            [this](size_t, model::ColumnSpan columns) {
                              auto part = std::make_unique<TwoStepWork>(*this);
                              if (!b.empty()) {
                                part->b = {b.begin() + columns.begin, b.begin() + columns.end};
                              }
                              return part;
                            });
  }

  absl::Status Run(Lane& lane, const batching::Batch& batch, char* result,
                   ExecutionReport* report) const override {
    if (runs != nullptr) ++*runs;
    std::vector<RowPiece> pieces;
    for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
      const auto& work = static_cast<const TwoStepWork&>(*task);
      pieces.push_back({work.x.data(), work.rows});
    }
    const int64_t m = batch.tokens;
    const int64_t k = Here(0).shape.k, middle = Here(0).shape.n, n = Here(1).shape.n;
    AWQD_ASSIGN_OR_RETURN(const void* from, lane.GatherRows(pieces, k * 4));
    AWQD_ASSIGN_OR_RETURN(void* between, lane.AllocateScratch(0, m * middle * 4));
    AWQD_ASSIGN_OR_RETURN(void* target, lane.AllocateResult(result, m * n * 4));
    MatmulArgs first = {&Here(0), {from, DType::kFp32, m, k}, {between, DType::kFp32, m, middle}};
    MatmulArgs second = {
        &Here(1), {between, DType::kFp32, m, middle}, {target, DType::kFp32, m, n}};
    AWQD_ASSIGN_OR_RETURN(first.bias, UploadBias(lane, a));
    AWQD_ASSIGN_OR_RETURN(second.bias, UploadBias(lane, b));
    AWQD_RETURN_IF_ERROR(RunProduct(
        lane, first, ChoosePath(lane, Here(0), m, ActivationQuantization::kNone), report));
    AWQD_RETURN_IF_ERROR(RunProduct(
        lane, second, ChoosePath(lane, Here(1), m, ActivationQuantization::kNone), report));
    return lane.Fetch(result, target, m * n * 4);
  }

 private:
  const DeviceWeight& Here(size_t index) const { return *both[index]->parts[part].weight; }

  static absl::StatusOr<const float*> UploadBias(Lane& lane, const std::vector<float>& bias) {
    if (bias.empty()) return nullptr;
    return lane.Upload(bias);
  }
};

}  // namespace awqd::engine
