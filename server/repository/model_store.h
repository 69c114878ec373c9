// ModelStore: models by name, loaded from their folders onto devices, and swapped atomically.
//
// Models are loaded and unloaded by explicit requests, and by the server itself: at start, on
// demand, when they are idle, and to reconcile what is served with the folders. Explicit requests
// take precedence.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/histogram.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "kernels/device.h"
#include "server/model/model.h"
#include "server/model/model_loader.h"
#include "server/model/placed_weight.h"
#include "server/repository/model_folders.h"

namespace awqd::repository {

enum class ModelState { kUnloaded, kLoading, kReady, kFailed };

struct ModelStatus {
  std::string name;
  ModelState state = ModelState::kUnloaded;
  std::string message;                                       // why it failed, UTF-8, at most 1 KiB
  std::shared_ptr<const model::Model> model;                 // null unless one is being served
  std::shared_ptr<const model::ModelStatistics> statistics;  // null: it was never loaded
  // Share of the bytes of the load in progress, from 0 to 1. Without a load: 1 where a model is
  // served, else 0.
  float loaded_share = 0;
  // Bytes that the load in progress takes on all devices. 0 without a load, and until the load is
  // planned.
  int64_t planned_bytes = 0;
  bool loading = false;              // a load is in progress, a reload too
  bool unloaded_idle = false;        // unloaded by UnloadIdle; the next request loads it
  bool explicitly_unloaded = false;  // by a request, and no request has loaded it since
  std::string tried;                 // FolderState's files, when the last load began
};

// Thread-safe. Loads run on the calling thread.
class ModelStore {
 public:
  using ModelPtr = std::shared_ptr<const model::Model>;

  // A repository alone may stand for `folders`; it need not contain anything yet. `devices`, one
  // or more, outlive the store. `log`, if given, gets the memory plan of a load, then a line at
  // most every two seconds, from the loading thread. `bar`, if given, gets a progress bar instead
  // of those lines.
  ModelStore(ModelFolders folders, std::vector<Device*> devices, model::Sharding sharding,
             model::ProgressLog log = nullptr, model::ProgressLog bar = nullptr)
      : folders_(std::move(folders)),
        devices_(std::move(devices)),
        sharding_(sharding),
        log_(std::move(log)),
        bar_(std::move(bar)) {}
  ModelStore(ModelFolders folders, Device* device)
      : ModelStore(std::move(folders), std::vector<Device*>{device}, model::Sharding::kReplicas) {}

  // Runs on the loading thread before a new version is served; an error fails the load. Set before
  // the first load.
  using BeforeServing = std::function<absl::Status(const model::Model&)>;
  void set_before_serving(BeforeServing hook) { before_serving_ = std::move(hook); }

  // Every load fails where a quantised weight cannot be read. Set before the first load.
  void set_require_all_weights(bool require) { require_all_weights_ = require; }
  // Other processes may map the weights. Set before the first load.
  void set_lend(bool lend) { lend_ = lend; }

  // --- Explicit requests ---

  // Loads or reloads. On success the new version replaces the old one at once. On failure the old
  // version is served on, the status message says why, and everything allocated on the way is freed
  // on every device. NOT_FOUND no such directory, INVALID_ARGUMENT bad name or checkpoint,
  // UNIMPLEMENTED format or scheme, RESOURCE_EXHAUSTED memory, ALREADY_EXISTS a load of this name
  // is in progress, UNAVAILABLE after CancelLoads. A reload needs room for both versions. A load
  // that the server began by itself is waited for instead, and its result is returned; if it fails,
  // this loads itself.
  // `require_all_weights`: the load also fails with the reason of the first quantised weight that
  // cannot be read.
  absl::StatusOr<ModelPtr> Load(absl::string_view name, bool require_all_weights = false);

  // NOT_FOUND when nothing is served under the name, unloaded while idle, or being loaded by the
  // server itself; such a load then ends with ABORTED. Memory is freed when the last request lets
  // go.
  absl::Status Unload(absl::string_view name);

  // --- Loads at start ---

  // Returns the served model, and loads only where none is served. Waits for a load of this name
  // that is in progress and returns its result if it succeeds; otherwise loads itself. Fails as
  // Load does.
  absl::StatusOr<ModelPtr> LoadUnlessServed(absl::string_view name);

  // --- Reconciling with the folders ---

  // Loads or reloads as Load does, for the reconciler. ABORTED where a request has unloaded the
  // model since it was last loaded, or does so meanwhile; ALREADY_EXISTS where a load is in
  // progress.
  absl::StatusOr<ModelPtr> Reconcile(absl::string_view name) {
    return RunLoad(name, LoadFor::kServer, require_all_weights_);
  }
  // The folder is gone: unloads version `version` (0: none is served) and forgets why a load of it
  // failed. Nothing happens where another version is served by now, or a load is in progress. True:
  // something was unloaded.
  bool UnloadRemoved(absl::string_view name, int64_t version);

  // --- Idle unload and load on demand ---

  // Unloads an idle model until a request names it, if it is still this version and has computed no
  // more than `requests`, as ModelStatistics counts them. True: it was unloaded.
  bool UnloadIdle(absl::string_view name, int64_t version, int64_t requests);
  // Whether LoadOnDemand would load it. Another thread may have loaded it when this returns.
  bool IsUnloadedIdle(absl::string_view name) const {
    MutexLock lock(&mu_);
    const auto it = entries_.find(name);
    return it != entries_.end() && it->second.unloaded_idle;
  }
  // Loads what UnloadIdle has unloaded; waits for a load in progress. Returns the served model at
  // once, and what Find returns for a model that was not unloaded while idle. Fails as Load does. A
  // load that fails for want of memory or at the end of the server is tried again on the next
  // demand; after another error it is not.
  absl::StatusOr<ModelPtr> LoadOnDemand(absl::string_view name);

  // --- Looking up ---

  // NOT_FOUND unknown model (or not loaded); UNAVAILABLE while its first load is in progress, or
  // when it was unloaded while idle.
  absl::StatusOr<ModelPtr> Find(absl::string_view name) const;
  // As Find, then as Model::FindWeight and Model::FindStack.
  absl::StatusOr<std::shared_ptr<const model::PlacedWeight>> FindWeight(
      absl::string_view model, absl::string_view weight) const {
    AWQD_ASSIGN_OR_RETURN(const ModelPtr found, Find(model));
    return found->FindWeight(weight);
  }
  absl::StatusOr<std::shared_ptr<const model::WeightStack>> FindStack(
      absl::string_view model, absl::string_view stack) const {
    AWQD_ASSIGN_OR_RETURN(const ModelPtr found, Find(model));
    return found->FindStack(stack);
  }

  // Every model that folders() finds and every known name, sorted. A model that was not loaded and
  // cannot be opened counts as failed.
  std::vector<ModelStatus> List() const;
  // Models that are served or being loaded, sorted, without reading the disk.
  std::vector<ModelStatus> ListServed() const;
  // Every name that was ever loaded, or failed to be though it is there, without reading the disk.
  std::vector<ModelStatus> ListKnown() const;

  // Whether any of the models being served has all its weights on devices that work, or none is
  // served.
  bool AnyServedWhole() const;

  const ModelFolders& folders() const { return folders_; }
  model::Sharding sharding() const { return sharding_; }

  // Bytes of the models being served from `device`; an old version that requests still hold is not
  // counted.
  int64_t device_bytes(const Device* device) const;

  // How long loads took that succeeded and that failed, nanoseconds.
  const Histogram& loads() const { return loads_; }
  const Histogram& failed_loads() const { return failed_loads_; }

  // For shutdown: loads in progress end with UNAVAILABLE after their current weight, and so does
  // every later one. What is served stays.
  void CancelLoads() {
    MutexLock lock(&mu_);
    cancelled_ = true;
    load_ended_.NotifyAll();
  }

 private:
  enum class LoadFor : uint8_t { kRequest, kServer };

  // A load in progress.
  struct LoadState {
    std::atomic<float> share{0.0f};         // of its bytes, from 0 to 1
    std::atomic<int64_t> planned_bytes{0};  // 0 until it is planned
    LoadFor whom = LoadFor::kRequest;       // set before others see it
    std::atomic<bool> unwanted{false};      // a request unloads meanwhile what the server loads
    std::atomic<bool> served{false};        // it has ended well
    std::string files;                      // FolderState's, at its begin; the loading thread's
  };

  struct Entry {
    ModelPtr model;
    std::shared_ptr<LoadState> loading;  // null: no load is in progress
    std::string message;
    int64_t loads = 0;
    std::shared_ptr<model::ModelStatistics> statistics = std::make_shared<model::ModelStatistics>();
    bool unloaded_idle = false;
    bool explicitly_unloaded = false;
    std::string tried;
  };

  // The fields of an entry that its load needs.
  struct Begun {
    std::shared_ptr<LoadState> state;
    std::shared_ptr<model::ModelStatistics> statistics;
    ModelPtr joined;  // of a load that was waited for: there is nothing to do
  };
  absl::StatusOr<Begun> BeginLoad(absl::string_view name, LoadFor whom);
  // Waits for a load of the server's own that is in progress. Null without one, and where it fails.
  ModelPtr JoinServerLoad(absl::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for a load of any kind that is in progress. Null where nothing is served then.
  ModelPtr WaitForLoad(absl::string_view name);
  absl::StatusOr<ModelPtr> RunLoad(absl::string_view name, LoadFor whom, bool require_all);
  // The load itself, without the lock. `seen`: whether there is anything of that name.
  absl::StatusOr<std::shared_ptr<model::Model>> LoadFromDisk(const std::string& name,
                                                             const Begun& begun, bool require_all,
                                                             bool* seen) const;
  absl::StatusOr<ModelPtr> EndLoad(absl::string_view name, const Begun& begun, bool seen,
                                   absl::StatusOr<std::shared_ptr<model::Model>> loaded);
  // The devices that a model loaded now is put on: of those that work. FAILED_PRECONDITION when
  // none does.
  absl::StatusOr<std::vector<Device*>> ChooseDevices() const;
  static ModelStatus MakeStatus(const std::string& name, const Entry& entry);

  const ModelFolders folders_;
  const std::vector<Device*> devices_;
  const model::Sharding sharding_;
  const model::ProgressLog log_;
  const model::ProgressLog bar_;
  BeforeServing before_serving_;
  bool require_all_weights_ = false, lend_ = false;
  std::atomic<bool> cancelled_{false};
  Histogram loads_{kLoadBounds}, failed_loads_{kLoadBounds};
  mutable Mutex mu_;
  CondVar load_ended_;
  std::map<std::string, Entry, std::less<>> entries_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::repository
