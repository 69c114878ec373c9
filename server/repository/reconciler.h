// The loads that no request asks for: those at start, and the Reconciler's, which keeps the served
// models equal to what the models' folders hold.
//
// The reconciler inspects the folders again and again instead of waiting for inotify alone: inotify
// reports neither what other machines write over NFS nor a link above a folder that is made to lead
// elsewhere, and it loses events when there are many. An inspection opens each file and compares
// inode, size and times.
//
// One pass does this with each model:
//   new, or with other files than when it was last loaded   loads it, once no file has changed for
//                                  the settle time
//   it cannot be loaded            the old version is served on; tried again when its files change,
//                                  and after a minute where there was no room for it
//   its folder is gone             unloads it, once the folder has been gone for the settle time
//   a request has unloaded it      nothing, until a request loads it
//   a load of it is in progress    nothing, until that load has ended
//   unloaded while idle            nothing; its next use loads what is there then
// Nothing is unloaded while the repository cannot be read, or while another, empty directory is in
// its place (a file system was unmounted).
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/repository/model_store.h"

namespace awqd::repository {

// --- At start ---

// The names of all models that the store's folders hold. If `load_models` (--load_model) is not
// empty, only these models of the repository, and every named folder. Names are checked here, so
// that a typing error ends the server before it listens. Logs a warning for each thing that looks
// like a model and is none, and for each model that cannot be opened.
// NOT_FOUND or PERMISSION_DENIED when the repository cannot be read, INVALID_ARGUMENT for a name;
// the errors of ModelFolders::CheckRepository.
absl::StatusOr<std::vector<std::string>> ChooseModels(const std::vector<std::string>& load_models,
                                                      bool may_be_empty, const ModelStore& store);

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

// --- As the folders change ---

struct WatchOptions {
  bool on = false;
  absl::Duration interval = absl::Seconds(5);  // between two passes
  // A model's files are loaded once they have not changed for this long.
  absl::Duration settle = absl::Seconds(10);
};

// Used by one thread at a time.
class Reconciler {
 public:
  // `only`: models of the repository that are loaded though no request named them; empty: all.
  // Models that requests have loaded are followed too. `store` outlives this.
  Reconciler(absl::Duration settle, const std::vector<std::string>& only, ModelStore* store)
      : settle_(settle), only_(only.begin(), only.end()), store_(store) {}

  struct Result {
    int loaded = 0;
    int failed = 0;
    int waiting = 0;  // for the settle time
  };
  // One pass at `now`: loads and unloads on the calling thread, and logs each. In the first pass
  // the settle time of files begins when they were last written to. Later it begins at the pass
  // that found them changed, because the clocks of other machines may be wrong.
  Result Reconcile(absl::Time now);

 private:
  struct Seen {
    model::FolderState look;
    absl::Time since;                           // the files have not changed since
    absl::Time retry = absl::InfiniteFuture();  // after there was no room
    std::string reported;                       // why it could not be loaded
  };
  // False when the repository seems to be missing.
  bool IsRepositoryThere(size_t found);
  void ReconcileModel(const std::string& name, const ModelStatus& status, absl::Time now,
                      Result* result);
  void LoadModel(const std::string& name, bool served, absl::Time now, Seen* seen, Result* result);

  const absl::Duration settle_;
  const std::set<std::string> only_;
  ModelStore* const store_;
  std::map<std::string, Seen> seen_;
  bool first_ = true;
  std::string identity_;  // of the repository, when a model was last found there
  std::string trouble_;   // with the repository, as it was reported
};

}  // namespace awqd::repository
