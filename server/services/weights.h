// From a request's source to a weight on the device: a loaded one at once, an inline one by way of
// a worker thread.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "awqd/v1/tensor.pb.h"
#include "server/model/placed_weight.h"
#include "server/services/env.h"

namespace awqd::services {

using WeightPtr = std::shared_ptr<const model::PlacedWeight>;

// NOT_FOUND unknown model or weight; UNAVAILABLE still loading.
absl::StatusOr<WeightPtr> FindWeight(const Env& env, const v1::WeightRef& ref);

// Calls `done` once from a worker thread, unless it returns an error. `packed` must live until
// then. `wanted` is asked when the weight's turn has come: packing takes long, and a call that has
// ended while it waited would take the time of those behind it.
absl::Status PackWeight(const Env& env, const v1::PackedWeight& packed,
                        std::function<absl::Status()> wanted,
                        std::function<void(absl::StatusOr<WeightPtr>)> done);

}  // namespace awqd::services
