// ModelStore: the folders of models -> weights on a device, by name, swapped
// atomically.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/mutex.h"
#include "kernels/device.h"
#include "server/model/model_folders.h"
#include "server/model/path_index.h"
#include "server/model/placed_weight.h"
#include "server/model/progress.h"
#include "server/model/weight_stack.h"
#include "server/obs/histogram.h"

namespace awqd::model {

// A loaded model. Immutable: requests in flight keep the version they started on alive.
struct Model {
  std::string name;
  int64_t version = 0;  // counts the loads under this name, from 1
  std::string quant_method;
  std::map<std::string, std::shared_ptr<const PlacedWeight>, std::less<>> weights;  // by path
  // The experts among them once more, by the stack's path; where they make none, why.
  std::map<std::string, absl::StatusOr<std::shared_ptr<const WeightStack>>, std::less<>> stacks;
  PathIndex weight_paths, stack_paths;  // of the two
  int ignored_tensors = 0;
  int64_t device_bytes = 0;                   // on all devices
  std::map<const Device*, int64_t> bytes_on;  // on each that holds any of it
  int64_t load_ms = 0;
};

enum class ModelState { kUnloaded, kLoading, kReady, kFailed };

struct ModelStatus {
  std::string name;
  ModelState state = ModelState::kUnloaded;
  std::string message;                  // why it failed, UTF-8, at most 1 KiB
  std::shared_ptr<const Model> model;   // null unless one is being served
  std::shared_ptr<const ModelUse> use;  // null: it was never loaded
  // Of the bytes of the load in progress, from 0 to 1; without one, 1 where a model is served.
  float loaded_share = 0;
  // Of the load in progress, on all devices; 0 without one, and until that is known.
  int64_t planned_bytes = 0;
  bool loading = false;   // a load is in progress, a reload too
  bool asleep = false;    // unloaded by LetSleep, until it is used
  bool kept_out = false;  // a client unloaded it, and none has loaded it since
  std::string tried;      // FolderState's files, when the last load began
};

// Thread-safe. Loads run on the calling thread.
class ModelStore {
 public:
  // `folders`: or a repository alone, which need not contain anything yet. `devices`, one or more,
  // outlive the store. `log`, if given, gets the memory plan of a load, then a line at most
  // every two seconds, from the loading thread.
  ModelStore(ModelFolders folders, std::vector<Device*> devices, Sharding sharding,
             ProgressLog log = nullptr, ProgressLog bar = nullptr);
  ModelStore(ModelFolders folders, Device* device)
      : ModelStore(std::move(folders), std::vector<Device*>{device}, Sharding::kReplicas) {}

  // Runs on the loading thread before a new version is served; an error fails the load. Set before
  // the first load.
  using BeforeServing = std::function<absl::Status(const Model&)>;
  void set_before_serving(BeforeServing hook) { before_serving_ = std::move(hook); }

  // For a client. Loads or reloads. On success the new version replaces the old one at once; on
  // failure nothing changes but the status message and everything allocated on the way is freed, on
  // every device. NOT_FOUND no such directory, INVALID_ARGUMENT bad name or checkpoint,
  // UNIMPLEMENTED format or scheme, RESOURCE_EXHAUSTED memory, ALREADY_EXISTS a load of this name
  // is in progress, UNAVAILABLE after CancelLoads. A reload needs room for both versions. A load by
  // Refresh or Wake is waited for instead, and what it loads is the result; if it fails, this loads
  // itself.
  absl::StatusOr<std::shared_ptr<const Model>> Load(absl::string_view name);

  // For whoever watches the folders: loads or reloads, as Load does. A client wins. ABORTED where
  // one has unloaded the model since it was last loaded, or does so meanwhile; ALREADY_EXISTS where
  // a load is in progress.
  absl::StatusOr<std::shared_ptr<const Model>> Refresh(absl::string_view name);
  // The folder is gone: unloads version `version` (0: none is served) and forgets why a load of it
  // failed. Nothing happens where another version is served by now, or a load is in progress. True:
  // something was unloaded.
  bool Drop(absl::string_view name, int64_t version);

  // Unloads a model until it is used, if it is still this version and has computed no more than
  // `requests`, as ModelUse counts them. True: it was unloaded.
  bool LetSleep(absl::string_view name, int64_t version, int64_t requests);
  // Whether Wake would load it. It may be asleep no more when this returns.
  bool Asleep(absl::string_view name) const;
  // Loads what LetSleep has unloaded; waits for a load in progress. What is served is the result at
  // once, and so is what Find says of a model that is not asleep. Fails as Load does; the model
  // stays asleep only where that was for want of memory or at the end of the server.
  absl::StatusOr<std::shared_ptr<const Model>> Wake(absl::string_view name);
  // Every name that was ever loaded, or failed to be though it is there: without a look at the
  // disk.
  std::vector<ModelStatus> Known() const;

  // What is served under the name, loaded only where nothing is. Waits for a load of this name
  // that is in progress and returns its result if it succeeds; otherwise loads itself.
  // Fails as Load does.
  absl::StatusOr<std::shared_ptr<const Model>> LoadUnlessServed(absl::string_view name);

  // For a client. NOT_FOUND when nothing is served under the name, nor asleep, nor being loaded by
  // the server itself; such a load then ends with ABORTED. Memory is freed when the last request
  // lets go.
  absl::Status Unload(absl::string_view name);

  // NOT_FOUND unknown model (or not loaded); UNAVAILABLE while its first load is in progress, or it
  // is asleep.
  absl::StatusOr<std::shared_ptr<const Model>> Find(absl::string_view name) const;

  // As Find, and NOT_FOUND naming up to five similar or first paths when the model has no such
  // weight. The path of a stack is NOT_FOUND too; the message says what takes it.
  absl::StatusOr<std::shared_ptr<const PlacedWeight>> FindWeight(absl::string_view model,
                                                                 absl::string_view weight) const;

  // As FindWeight, of stacks: the path of one weight is NOT_FOUND and the message names a stack.
  // FAILED_PRECONDITION, as MakeStack has it, when the experts of that path make none.
  absl::StatusOr<std::shared_ptr<const WeightStack>> FindStack(absl::string_view model,
                                                               absl::string_view stack) const;

  // Every model that folders() finds and every known name, sorted. A model that was not loaded and
  // cannot be opened counts as failed.
  std::vector<ModelStatus> List() const;

  // Whether any of the models being served has all its weights on devices that work, or none is
  // served.
  bool AnyWhole() const;

  // Where models come from.
  const ModelFolders& folders() const { return folders_; }

  // Bytes of the models being served from `device`; an old version that requests still hold is not
  // counted.
  int64_t device_bytes(const Device* device) const;
  Sharding sharding() const { return sharding_; }

  // What is served or being loaded, sorted: what List says of it, without a look at the disk.
  std::vector<ModelStatus> Served() const;
  // How long loads took that succeeded and that failed, nanoseconds.
  const obs::Histogram& loads() const { return loads_; }
  const obs::Histogram& failed_loads() const { return failed_loads_; }

  // For shutdown: loads in progress end with UNAVAILABLE after their current weight, and so does
  // every later one. What is served stays.
  void CancelLoads() {
    MutexLock lock(&mu_);
    cancelled_ = true;
    load_ended_.NotifyAll();
  }

 private:
  struct Entry {
    std::shared_ptr<const Model> model;
    std::shared_ptr<LoadState> loading;  // null: no load is in progress
    std::string message;
    int64_t loads = 0;
    std::shared_ptr<ModelUse> use = std::make_shared<ModelUse>();
    bool asleep = false;
    bool kept_out = false;
    std::string tried;
  };

  // What of an entry the load of it needs: its state, to be kept up to date, and its use.
  struct Begun {
    std::shared_ptr<LoadState> state;
    std::shared_ptr<ModelUse> use;
    std::shared_ptr<const Model> joined;  // of a load that was waited for: there is nothing to do
  };
  enum class LoadFor : uint8_t { kClient, kServer };
  absl::StatusOr<Begun> BeginLoad(absl::string_view name, LoadFor whom);
  // What a load of the server's own that is in progress leads to, once it has ended; null without
  // one, and where it fails.
  std::shared_ptr<const Model> JoinLoad(absl::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<std::shared_ptr<const Model>> RunLoad(absl::string_view name, LoadFor whom);
  static ModelStatus StatusOf(const std::string& name, const Entry& entry);
  // `seen`: whether there is anything of that name.
  absl::StatusOr<std::shared_ptr<const Model>> EndLoad(
      absl::string_view name, const Begun& begun, bool seen,
      absl::StatusOr<std::shared_ptr<Model>> loaded);
  // The devices that a model loaded now is put on: of those that work. FAILED_PRECONDITION when
  // none does.
  absl::StatusOr<std::vector<Device*>> Targets() const;
  // The load itself, without the lock.
  absl::StatusOr<std::shared_ptr<Model>> LoadFromDisk(const std::string& name, const Begun& begun,
                                                      bool* seen) const;

  const ModelFolders folders_;
  const std::vector<Device*> devices_;
  const Sharding sharding_;
  const ProgressLog log_;
  const ProgressLog bar_;
  BeforeServing before_serving_;
  std::atomic<bool> cancelled_{false};
  obs::Histogram loads_{obs::kLoadBounds}, failed_loads_{obs::kLoadBounds};
  mutable Mutex mu_;
  CondVar load_ended_;
  std::map<std::string, Entry, std::less<>> entries_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::model
