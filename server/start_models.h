// Chooses and loads the models that a server starts with, and logs the results.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/config/options.h"
#include "server/model/model_store.h"

namespace awqd {

// Returns the names of all models in the store's folders; if --load_model is given, only its models
// of the repository. Names are checked here, so that a typing error ends the server before it
// listens. Logs one warning for each folder that looks like a model and is not, and for each that
// cannot be opened. NOT_FOUND or PERMISSION_DENIED when the repository cannot be read,
// INVALID_ARGUMENT for a name.
absl::StatusOr<std::vector<std::string>> ModelsToLoad(const Options& options,
                                                      const model::ModelStore& store);

struct LoadedAtStart {
  size_t loaded = 0;
  std::vector<absl::Status> failed;  // each names its model

  // Every reason in one line, with the code of the first. OK if no model failed.
  absl::Status Error() const;
};

// Loads the models one after the other, on the calling thread; a failed model does not stop the
// others. Models that clients have loaded meanwhile are not loaded again. Logs each model that was
// loaded, and at the end each one that was not. Returns early, and logs no failures, once
// `stopping` is true.
LoadedAtStart LoadAtStart(const std::vector<std::string>& names, const std::atomic<bool>& stopping,
                          model::ModelStore* store);

// Logs "loaded" with the loaded model.
void LogLoaded(const model::Model& model);
// Logs "model cannot be loaded" with the reason. `served`: an earlier version of the model stays
// served.
void LogNotLoaded(const std::string& name, const absl::Status& status, bool served);

}  // namespace awqd
