// GatedMlpWork: three products with what lies between them.
#include "server/engine/gated_mlp_work.h"

#include <utility>

#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/engine/lane.h"

namespace awqd::engine {
namespace {

constexpr size_t kGateSlot = 1, kUpSlot = 2, kDownSlot = 3;

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
  AWQD_ASSIGN_OR_RETURN(void* gate, lane.Scratch(kGateSlot, rows * middle * 4));
  AWQD_ASSIGN_OR_RETURN(void* up, lane.Scratch(kUpSlot, rows * middle * 4));
  ExpertProduct product = {.stack = gate_.get(),
                           .part = part,
                           .x = routed.x,
                           .y = {gate, DType::kFp32, rows, middle},
                           .ends = routed.ends,
                           .activation = activation,
                           .path = path};
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  product.stack = up_.get();
  product.y.data = up;
  product.activation = ActivationFunction::kNone;
  AWQD_RETURN_IF_ERROR(RunExperts(lane, product, report));
  AWQD_RETURN_IF_ERROR(MultiplyByUp({.gate = static_cast<float*>(gate),
                                     .up = static_cast<const float*>(up),
                                     .count = rows * middle},
                                    on(), lane.stream()));
  product.stack = down_.get();
  product.x = {gate, DType::kFp32, rows, middle};
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

}  // namespace awqd::engine
