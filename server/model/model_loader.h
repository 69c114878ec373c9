// LoadModel: one checkpoint -> weights on devices, one weight at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/checkpoint/repository_root.h"
#include "server/model/memory_plan.h"
#include "server/model/model.h"
#include "server/model/progress.h"

namespace awqd::model {

// Loads the model in folder `path` beneath `root`. `version` of the result is 0; the store counts
// versions. Fails before anything is allocated for a weight when the load's MemoryPlan does not
// fit. INVALID_ARGUMENT if the size, a time or the inode of a file changed during the load. On an
// error nothing stays allocated on any device. UNAVAILABLE once `cancelled`.
absl::StatusOr<std::shared_ptr<Model>> LoadModel(const RepositoryRoot& root,
                                                 const std::string& path, const std::string& name,
                                                 const LoadTarget& target,
                                                 const std::atomic<bool>& cancelled,
                                                 const ProgressSinks& sinks);

}  // namespace awqd::model
