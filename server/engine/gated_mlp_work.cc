// GatedMlpWork: three products with what lies between them.
#include "server/engine/gated_mlp_work.h"

#include <utility>

#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"

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

double GatedMlpWork::row_cost() const {
  const WeightShape& in = first();
  return static_cast<double>(in.n) * static_cast<double>(2 * in.k + last().n);
}

absl::Status GatedMlpWork::Compute(Lane& lane, const RoutedTokens& routed, char* y,
                                   ExecutionReport* report) const {
  const int64_t rows = routed.x.rows, middle = first().n, n = last().n;
  // The rows of gate, then those of up.
  AWQD_ASSIGN_OR_RETURN(void* both, lane.Scratch(kMiddleSlot, 2 * rows * middle * 4));
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
  AWQD_RETURN_IF_ERROR(Join(lane, static_cast<float*>(both), rows, &product));
  if (routed.rows != nullptr) {
    AWQD_ASSIGN_OR_RETURN(void* sums, lane.Scratch(kDownSlot, rows * n * 4));
    product.y = {sums, DType::kFp32, rows, n};
    AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
    return Combine(lane, routed, sums, y);
  }
  const int64_t y_bytes = rows * n * SizeOf(out_dtype);
  AWQD_ASSIGN_OR_RETURN(void* target, lane.Target(y, y_bytes));
  product.y = {target, out_dtype, rows, n};
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  return lane.Fetch(y, target, y_bytes);
}

absl::Status GatedMlpWork::Join(Lane& lane, float* both, int64_t rows, ExpertProduct* down) const {
  const int64_t middle = first().n;
  GateArgs args = {
      .gate = both, .up = both + rows * middle, .count = rows * middle, .activation = activation};
  // One kernel for all experts reads FP16 with a scale for each row. Else stage makes it, of FP32.
  down->x = {nullptr, DType::kFp16, rows, middle};
  if (middle % 8 == 0 && RunsAtOnce(*down)) {
    AWQD_ASSIGN_OR_RETURN(void* half, lane.Scratch(kHalfSlot, rows * middle * 2));
    AWQD_ASSIGN_OR_RETURN(void* scale, lane.Scratch(kHalfScaleSlot, rows * 4));
    args.half = static_cast<uint16_t*>(half);
    args.half_scale = static_cast<float*>(scale);
    args.cols = middle;
    down->x.data = half;
    down->x_scale = args.half_scale;
  } else {
    down->x = {both, DType::kFp32, rows, middle};
  }
  return MultiplyByUp(args, on(), lane.stream());
}

}  // namespace awqd::engine
