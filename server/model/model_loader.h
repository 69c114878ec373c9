// LoadModel: one checkpoint -> weights on devices, one weight at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "server/model/memory_plan.h"
#include "server/model/model_folders.h"
#include "server/model/model_store.h"
#include "server/model/progress.h"

namespace awqd::model {

// `version` of the result is 0: the store counts. Fails before anything is allocated for a weight
// when the load's MemoryPlan does not fit. When it ends, INVALID_ARGUMENT where the size, a time or
// the inode of a file that was read is no longer what it was. On an error nothing stays allocated on
// any device. UNAVAILABLE once `cancelled`.
absl::StatusOr<std::shared_ptr<Model>> LoadModel(const ModelFolder& folder, const std::string& name,
                                                 const LoadTarget& target,
                                                 const std::atomic<bool>& cancelled,
                                                 const ProgressSinks& sinks);

}  // namespace awqd::model
