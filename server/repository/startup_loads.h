// The models that a server starts with: which they are, loading them, and what to say of it.
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

// The names of all models that the store's folders hold; of those of the repository only the ones
// that --load_model names, if it does. Names are checked here, so that a typing error ends the
// server before it listens. Logs one warning for each thing that looks like a model and is none,
// and for each that cannot be opened.
// NOT_FOUND or PERMISSION_DENIED when the repository cannot be read, INVALID_ARGUMENT for a name.
absl::StatusOr<std::vector<std::string>> ModelsToLoad(const Options& options,
                                                      const model::ModelStore& store);

struct LoadedAtStart {
  size_t loaded = 0;
  std::vector<absl::Status> failed;  // each names its model

  // Every reason in one line, with the code of the first. OK when none failed.
  absl::Status Error() const;
};

// Loads them one after the other, on the calling thread; a model that fails does not keep the
// others. Models that clients have loaded meanwhile are not loaded again. Logs each model that was
// loaded, and at the end, one after the other, those that were not. Returns early, and says nothing
// of failures, once `stopping`.
LoadedAtStart LoadAtStart(const std::vector<std::string>& names, const std::atomic<bool>& stopping,
                          model::ModelStore* store);

// "loaded", with what was loaded.
void LogLoaded(const model::Model& model);
// "model cannot be loaded", and why. `served`: an earlier version of it is, and goes on being.
void LogNotLoaded(const std::string& name, const absl::Status& status, bool served);

}  // namespace awqd
