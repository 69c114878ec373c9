// The loads at start: choosing the models, loading them, and logging the result.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/repository/model_store.h"

namespace awqd::repository {

// The names of all models that the store's folders hold. If `load_models` (--load_model) is not
// empty, only these models of the repository, and every named folder. Names are checked here, so
// that a typing error ends the server before it listens. Logs a warning for each thing that looks
// like a model and is none, and for each model that cannot be opened.
// NOT_FOUND or PERMISSION_DENIED when the repository cannot be read, INVALID_ARGUMENT for a name.
absl::StatusOr<std::vector<std::string>> ChooseModels(const std::vector<std::string>& load_models,
                                                      const ModelStore& store);

struct LoadedAtStart {
  size_t loaded = 0;
  std::vector<absl::Status> failed;  // each names its model

  // Every reason in one line, with the code of the first. OK when none failed.
  absl::Status Error() const;
};

// Loads them one after the other, on the calling thread; a failure does not keep the others from
// being loaded. Models that requests have loaded meanwhile are not loaded again. Logs each model
// that was loaded, and at the end those that were not. Returns early, and logs no failure, once
// `stopping`.
LoadedAtStart LoadAtStart(const std::vector<std::string>& names, const std::atomic<bool>& stopping,
                          ModelStore* store);

// Logs "loaded" with the model's figures.
void LogLoaded(const model::Model& model);
// Logs "model cannot be loaded" and why. `served`: an earlier version is served on.
void LogNotLoaded(const std::string& name, const absl::Status& status, bool served);

}  // namespace awqd::repository
