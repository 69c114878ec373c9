// What runs once for a weight before it is shown ready, so that no request pays for modules,
// handles and buffers coming up.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/batching/batch.h"
#include "server/engine/staging.h"
#include "server/model/placed_weight.h"

namespace awqd::engine {

// Calls `run` with batches that run every row of the weight's plan, for its smallest token count
// and for its largest up to `max_tokens`. Ends at the first error. An operation whose kernels these
// do not bring up adds its batches here.
absl::Status RunWarmUp(const std::shared_ptr<const model::PlacedWeight>& weight, int64_t max_tokens,
                       StagingPool& staging,
                       absl::FunctionRef<absl::Status(const batching::Batch& batch)> run);

}  // namespace awqd::engine
