// Loads and unloads that clients cause, by whichever protocol. They may block for long, so they run
// on Env::loads, and they go on when their client goes away.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/repository/model_store.h"
#include "server/services/env.h"

namespace awqd::services {

// As ModelStore's functions, with a line in the log that says how it ended. Errors are those that
// clients may see.
absl::StatusOr<std::shared_ptr<const model::Model>> LoadModel(const Env& env,
                                                              const std::string& name);
absl::Status UnloadModel(const Env& env, const std::string& name);
// For repository::LoadOnDemand.
absl::Status LoadModelOnDemand(const Env& env, const std::string& name);

}  // namespace awqd::services
