// Three products, and the gate between them.
#include "server/engine/gated_mlp_work.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"
#include "server/engine/reassembly.h"

namespace awqd::engine {
namespace {

constexpr size_t kMiddleSlot = 1, kDownSlot = 2, kHalfSlot = 3, kHalfScaleSlot = 4;

}  // namespace

GatedMlpWork::GatedMlpWork(std::shared_ptr<const model::WeightStack> gate,
                           std::shared_ptr<const model::WeightStack> up,
                           std::shared_ptr<const model::WeightStack> down)
    : gate_(std::move(gate)),
      up_(std::move(up)),
      down_(std::move(down)),
      first_experts_{gate_->experts.front(), up_->experts.front(), down_->experts.front()} {}

batching::BatchKey GatedMlpWork::merge_key() const {
  return {.subject = &Here(*gate_), .variant = variant(), .further = {&Here(*up_), &Here(*down_)}};
}

bool GatedMlpWork::partitioned() const {
  return Work::partitioned() || gate_->expert_parallel() || up_->expert_parallel() ||
         down_->expert_parallel();
}

// Every device that has columns of gate has them of up, and the same rows of down.
absl::Status GatedMlpWork::CheckPartitionedAlike() const {
  const auto& [gate, up, down] = first_experts_;
  const auto borders = [](const model::PlacedWeight& weight, bool rows) {
    return absl::StrJoin(weight.parts, ", ", [rows](std::string* out, const auto& part) {
      absl::StrAppend(out, part.weight->device->info().id, rows ? " rows [" : " columns [",
                      rows ? part.row_begin : part.col_begin, ", ",
                      rows ? part.row_end() : part.col_end(), ")");
    });
  };
  if (!down->partitioned_at_rows()) {
    return absl::UnimplementedError(absl::StrCat(
        name(), ": got a down projection on ", borders(*down, false),
        ", expected one that is cut at the rows where gate is cut at columns: it has an order, a "
        "factor or groups that 128 is no multiple of, or its path does not end in the name of a "
        "down projection; serve with --shard=replicas, --shard=models or --shard=experts"));
  }
  const auto alike = [&down = *down](const model::PlacedWeight& weight) {
    return absl::c_equal(weight.parts, down.parts, [](const auto& columns, const auto& rows) {
      return columns.weight->device == rows.weight->device && columns.col_begin == rows.row_begin &&
             columns.col_end() == rows.row_end();
    });
  };
  for (const auto* const weight : {gate.get(), up.get()}) {
    if (alike(*weight)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        name(), ": got ", weight == gate.get() ? "gate" : "up", " on ", borders(*weight, false),
        ", expected it as down is, on ", borders(*down, true)));
  }
  return absl::OkStatus();
}

absl::StatusOr<WorkPartition> GatedMlpWork::Partition(StagingPool& staging) const {
  if (gate_->expert_parallel()) {
    const auto alike = [&](const model::WeightStack& stack) {
      return stack.devices() == gate_->devices() && stack.places == gate_->places;
    };
    if (!alike(*up_) || !alike(*down_)) {
      return absl::FailedPreconditionError(absl::StrCat(
          name(), ": got gate on ", gate_->devices(), ", up on ", up_->devices(), " and down on ",
          down_->devices(), ", expected each expert's on one device"));
    }
    return PartitionExperts(*gate_, staging, [&](size_t shard) {
      auto out = std::make_unique<GatedMlpWork>(gate_->shards[shard], up_->shards[shard],
                                                down_->shards[shard]);
      static_cast<RoutedWork&>(*out) = *this;
      return out;
    });
  }
  AWQD_RETURN_IF_ERROR(CheckPartitionedAlike());
  const Reduction reduction = {.count = y_rows(), .cols = down_->shape().n, .y_dtype = out_dtype};
  const auto make = [&](size_t) -> absl::StatusOr<std::unique_ptr<Work>> {
    auto part = std::make_unique<GatedMlpWork>(*this);
    part->out_dtype = DType::kFp32;
    return part;
  };
  return PartitionPartialSums(reduction, first_experts_[0]->parts.size(), make);
}

double GatedMlpWork::row_cost() const {
  const WeightShape& in = first();
  return static_cast<double>(in.n) * static_cast<double>(2 * in.k + last().n);
}

absl::Status GatedMlpWork::Compute(Lane& lane, const RoutedTokens& routed, char* y,
                                   ExecutionReport* report) const {
  const int64_t rows = routed.x.rows, middle = first().n, n = last().n;
  // The rows of gate, then those of up.
  AWQD_ASSIGN_OR_RETURN(void* both, lane.AllocateScratch(kMiddleSlot, 2 * rows * middle * 4));
  ExpertProduct product = {.stack = gate_.get(),
                           .also = up_.get(),
                           .part = part,
                           .x = routed.x,
                           .y = {both, DType::kFp32, 2 * rows, middle},
                           .ends = routed.ends,
                           .path = path};
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  product.stack = down_.get();
  product.also = nullptr;
  AWQD_RETURN_IF_ERROR(MultiplyGate(lane, static_cast<float*>(both), rows, &product));
  if (routed.rows != nullptr) {
    AWQD_ASSIGN_OR_RETURN(void* sums, lane.AllocateScratch(kDownSlot, rows * n * 4));
    product.y = {sums, DType::kFp32, rows, n};
    AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
    return CombineAndFetch(lane, routed, sums, y);
  }
  const int64_t y_bytes = rows * n * SizeOf(out_dtype);
  AWQD_ASSIGN_OR_RETURN(void* target, lane.AllocateResult(y, y_bytes));
  product.y = {target, out_dtype, rows, n};
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  return lane.Fetch(y, target, y_bytes);
}

absl::Status GatedMlpWork::MultiplyGate(Lane& lane, float* both, int64_t rows,
                                        ExpertProduct* down) const {
  const int64_t middle = first().n;
  GateArgs args = {
      .gate = both, .up = both + rows * middle, .count = rows * middle, .activation = activation};
  // One kernel for all experts reads FP16 with a scale for each row. Else the prologue makes it of
  // FP32.
  down->x = {nullptr, DType::kFp16, rows, middle};
  if (middle % 8 == 0 && IsOneKernel(*down)) {
    AWQD_ASSIGN_OR_RETURN(void* half, lane.AllocateScratch(kHalfSlot, rows * middle * 2));
    AWQD_ASSIGN_OR_RETURN(void* scale, lane.AllocateScratch(kHalfScaleSlot, rows * 4));
    args.half = static_cast<uint16_t*>(half);
    args.half_scale = static_cast<float*>(scale);
    args.cols = middle;
    down->x.data = half;
    down->x_scale = args.half_scale;
  } else {
    down->x = {both, DType::kFp32, rows, middle};
  }
  return MultiplyByUp(args, step_device(), lane.stream());
}

}  // namespace awqd::engine
