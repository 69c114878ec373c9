// Names, versions and the atomic swap. Nothing slow happens under the lock, freeing included.
#include "server/repository/model_store.h"

#include <algorithm>
#include <exception>
#include <new>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/out_of_memory.h"

namespace awqd::repository {
namespace {

// One model's message must not crowd the others out of ListModels.
constexpr size_t kMaxMessageBytes = 1024;

constexpr absl::string_view kUnloadedIdle =
    "unloaded because it was not used; the next request that names it loads it";

}  // namespace

absl::StatusOr<ModelStore::Begun> ModelStore::BeginLoad(absl::string_view name, LoadFor whom) {
  const bool for_request = whom == LoadFor::kRequest;
  MutexLock lock(&mu_);
  if (for_request) {
    if (auto joined = JoinServerLoad(name); joined != nullptr)
      return Begun{.joined = std::move(joined)};
  } else if (const auto it = entries_.find(name);
             it != entries_.end() && it->second.explicitly_unloaded) {
    return absl::AbortedError(absl::StrCat("model \"", name, "\": a client has unloaded it"));
  }
  if (cancelled_) return absl::UnavailableError("the server is shutting down");
  Entry& entry = entries_[std::string(name)];
  if (entry.loading != nullptr) {
    return absl::AlreadyExistsError(
        absl::StrCat("model \"", name, "\": a load of it is in progress"));
  }
  if (for_request) entry.explicitly_unloaded = false;
  entry.loading = std::make_shared<LoadState>();
  entry.loading->whom = whom;
  return Begun{entry.loading, entry.statistics};
}

ModelStore::ModelPtr ModelStore::JoinServerLoad(absl::string_view name) {
  while (!cancelled_) {
    auto it = entries_.find(name);
    if (it == entries_.end() || it->second.loading == nullptr) return nullptr;
    const std::shared_ptr<LoadState> theirs = it->second.loading;
    if (theirs->whom == LoadFor::kRequest) return nullptr;
    it->second.explicitly_unloaded = false;
    // The entry may be gone when the lock is back.
    while (it != entries_.end() && it->second.loading == theirs && !cancelled_) {
      load_ended_.Wait(&mu_);
      it = entries_.find(name);
    }
    // The load has compared all files at its end, so it read what was there when this began.
    if (it != entries_.end() && theirs->served && it->second.model != nullptr) {
      return it->second.model;
    }
  }
  return nullptr;
}

absl::StatusOr<std::vector<Device*>> ModelStore::ChooseDevices() const {
  std::vector<Device*> working;
  std::copy_if(devices_.begin(), devices_.end(), std::back_inserter(working),
               [](const Device* device) { return device->healthy(); });
  if (working.empty()) return absl::FailedPreconditionError("every device has failed");
  if (sharding_ != model::Sharding::kModels) return working;
  return std::vector<Device*>{*std::max_element(
      working.begin(), working.end(),
      [](const Device* a, const Device* b) { return a->FreeBytes() < b->FreeBytes(); })};
}

absl::StatusOr<std::shared_ptr<model::Model>> ModelStore::LoadFromDisk(const std::string& name,
                                                                       const Begun& begun,
                                                                       bool require_all,
                                                                       bool* seen) const {
  const absl::StatusOr<ModelFolder> located = folders_.Locate(name, seen);
  // Before anything is read, so that a later inspection finds changes from here on.
  begun.state->files = ModelFolders::InspectFolder(located).files;
  AWQD_ASSIGN_OR_RETURN(const ModelFolder folder, located);
  AWQD_ASSIGN_OR_RETURN(std::vector<Device*> targets, ChooseDevices());
  const model::LoadTarget target = {.devices = std::move(targets),
                                    .sharding = sharding_,
                                    .statistics = begun.statistics,
                                    .require_all = require_all,
                                    .lend = lend_};
  AWQD_ASSIGN_OR_RETURN(
      std::shared_ptr<model::Model> model,
      model::LoadModel(*folder.root, folder.path, name, target, cancelled_,
                       {log_, bar_, &begun.state->share, &begun.state->planned_bytes}));
  if (before_serving_) AWQD_RETURN_IF_ERROR(before_serving_(*model));
  return model;
}

absl::StatusOr<ModelStore::ModelPtr> ModelStore::EndLoad(
    absl::string_view name, const Begun& begun, bool seen,
    absl::StatusOr<std::shared_ptr<model::Model>> loaded) {
  ModelPtr old;  // outlives the lock: freeing a model takes long
  MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  Entry& entry = it->second;
  entry.loading = nullptr;
  entry.tried = std::move(begun.state->files);  // which needs no memory
  load_ended_.NotifyAll();
  if (begun.state->unwanted) {
    if (loaded.ok()) old = *std::move(loaded);
    entry.message.clear();
    return absl::AbortedError(
        absl::StrCat("model \"", name, "\": a client unloaded it while it was loaded"));
  }
  const bool passes = absl::IsResourceExhausted(loaded.status()) || cancelled_;
  entry.unloaded_idle =
      entry.unloaded_idle && !loaded.ok() && (begun.state->whom == LoadFor::kRequest || passes);
  if (!loaded.ok()) {
    entry.message = std::string(ClipUtf8(loaded.status().message(), kMaxMessageBytes));
    // Names that never existed leave nothing behind, however many clients invent.
    const bool invented = (!seen || absl::IsNotFound(loaded.status())) && entry.loads == 0;
    if (invented) entries_.erase(it);
    return loaded.status();
  }
  (*loaded)->version = ++entry.loads;
  entry.message.clear();
  begun.state->served = true;
  old = std::exchange(entry.model, *std::move(loaded));
  return entry.model;
}

absl::StatusOr<ModelStore::ModelPtr> ModelStore::Load(absl::string_view name,
                                                      bool require_all_weights) {
  return RunLoad(name, LoadFor::kRequest, require_all_weights || require_all_weights_);
}

absl::StatusOr<ModelStore::ModelPtr> ModelStore::RunLoad(absl::string_view name, LoadFor whom,
                                                         bool require_all) {
  AWQD_RETURN_IF_ERROR(CheckModelName(name));
  const std::string no_memory =
      absl::StrCat("model \"", name, "\": host memory ran out while it was loaded");
  AWQD_ASSIGN_OR_RETURN(const Begun begun, BeginLoad(name, whom));
  if (begun.joined != nullptr) {
    if (require_all) AWQD_RETURN_IF_ERROR(begun.joined->CheckAllServed());
    return begun.joined;
  }
  const absl::Time start = absl::Now();
  bool seen = false;
  // Whatever happens, the load that has begun must end. A thread that cannot be started throws
  // another exception than an allocation that fails.
  const auto load = [&]() -> absl::StatusOr<std::shared_ptr<model::Model>> {
    try {
      return LoadFromDisk(std::string(name), begun, require_all, &seen);
    } catch (const std::bad_alloc&) {
      return OutOfMemory(no_memory);
    } catch (const std::exception& error) {
      return absl::InternalError(absl::StrCat("model \"", name, "\": ", error.what()));
    }
  };
  absl::StatusOr<std::shared_ptr<model::Model>> loaded = load();
  (loaded.ok() ? loads_ : failed_loads_).Observe(absl::ToInt64Nanoseconds(absl::Now() - start));
  return EndLoad(name, begun, seen, std::move(loaded));
}

ModelStore::ModelPtr ModelStore::WaitForLoad(absl::string_view name) {
  MutexLock lock(&mu_);
  for (auto it = entries_.find(name); it != entries_.end(); it = entries_.find(name)) {
    if (it->second.model != nullptr) return it->second.model;
    if (it->second.loading == nullptr || cancelled_) break;
    load_ended_.Wait(&mu_);
  }
  return nullptr;
}

absl::StatusOr<ModelStore::ModelPtr> ModelStore::LoadUnlessServed(absl::string_view name) {
  for (;;) {
    if (ModelPtr served = WaitForLoad(name)) return served;
    auto model = Load(name);
    // Another load may have begun in between: it is waited for as well.
    if (!absl::IsAlreadyExists(model.status())) return model;
  }
}

absl::Status ModelStore::Unload(absl::string_view name) {
  AWQD_RETURN_IF_ERROR(CheckModelName(name));
  ModelPtr old;
  MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  const bool known = it != entries_.end();
  const bool coming = known && it->second.loading != nullptr &&
                      it->second.loading->whom == LoadFor::kServer && !it->second.loading->unwanted;
  if (!known || (it->second.model == nullptr && !it->second.unloaded_idle && !coming)) {
    return absl::NotFoundError(absl::StrCat("model \"", name, "\": not loaded"));
  }
  Entry& entry = it->second;
  old = std::exchange(entry.model, nullptr);
  entry.message.clear();
  entry.unloaded_idle = false;
  entry.explicitly_unloaded = true;
  if (coming) entry.loading->unwanted = true;
  return absl::OkStatus();
}

bool ModelStore::UnloadRemoved(absl::string_view name, int64_t version) {
  ModelPtr old;  // outlives the lock
  MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  if (it == entries_.end() || it->second.loading != nullptr) return false;
  Entry& entry = it->second;
  if ((entry.model == nullptr ? 0 : entry.model->version) != version) return false;
  const bool served = entry.model != nullptr || entry.unloaded_idle;
  old = std::exchange(entry.model, nullptr);
  entry.message.clear();
  entry.tried.clear();
  entry.unloaded_idle = false;
  if (entry.loads == 0) entries_.erase(it);
  return served;
}

bool ModelStore::UnloadIdle(absl::string_view name, int64_t version, int64_t requests) {
  ModelPtr old;  // outlives the lock
  MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  if (it == entries_.end()) return false;
  Entry& entry = it->second;
  if (entry.model == nullptr || entry.loading != nullptr || entry.model->version != version ||
      entry.statistics->requests != requests) {
    return false;
  }
  old = std::exchange(entry.model, nullptr);
  entry.message.clear();
  entry.unloaded_idle = true;
  return true;
}

absl::StatusOr<ModelStore::ModelPtr> ModelStore::LoadOnDemand(absl::string_view name) {
  for (;;) {
    if (ModelPtr served = WaitForLoad(name)) return served;
    if (!IsUnloadedIdle(name)) return Find(name);
    auto model = RunLoad(name, LoadFor::kServer, require_all_weights_);
    // An explicit request, or another call, was quicker. Its end decides.
    if (!absl::IsAlreadyExists(model.status()) && !absl::IsAborted(model.status())) return model;
  }
}

absl::StatusOr<ModelStore::ModelPtr> ModelStore::Find(absl::string_view name) const {
  AWQD_RETURN_IF_ERROR(CheckModelName(name));
  MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  if (it == entries_.end()) {
    return absl::NotFoundError(absl::StrCat("model \"", name, "\": no such model is loaded"));
  }
  const Entry& entry = it->second;
  if (entry.model != nullptr) return entry.model;
  if (entry.loading != nullptr) {
    return absl::UnavailableError(absl::StrCat("model \"", name, "\": still loading"));
  }
  if (entry.unloaded_idle) {
    return absl::UnavailableError(absl::StrCat("model \"", name, "\": ", kUnloadedIdle));
  }
  return absl::NotFoundError(absl::StrCat(
      "model \"", name, "\": not loaded",
      entry.message.empty() ? "" : absl::StrCat("; its last load failed: ", entry.message)));
}

ModelStatus ModelStore::MakeStatus(const std::string& name, const Entry& entry) {
  ModelStatus status = {name, ModelState::kUnloaded, entry.message, entry.model, entry.statistics};
  status.loaded_share = entry.loading != nullptr ? entry.loading->share.load()
                        : entry.model != nullptr ? 1.0f
                                                 : 0.0f;
  if (entry.loading != nullptr) status.planned_bytes = entry.loading->planned_bytes;
  status.loading = entry.loading != nullptr;
  status.unloaded_idle = entry.unloaded_idle;
  status.explicitly_unloaded = entry.explicitly_unloaded;
  status.tried = entry.tried;
  if (entry.model != nullptr) {
    const model::Losses losses = model::FindLosses(*entry.model);
    status.state = losses.weights > 0 ? ModelState::kFailed : ModelState::kReady;
    if (status.message.empty()) status.message = losses.Message();
    if (status.message.empty()) {
      status.message = std::string(ClipUtf8(entry.model->UnservedMessage(), kMaxMessageBytes));
    }
  } else if (entry.loading != nullptr) {
    status.state = ModelState::kLoading;
  } else if (entry.unloaded_idle) {
    if (status.message.empty()) status.message = std::string(kUnloadedIdle);
  } else if (!entry.message.empty()) {
    status.state = ModelState::kFailed;
  }
  return status;
}

std::vector<ModelStatus> ModelStore::ListServed() const {
  std::vector<ModelStatus> out = ListKnown();
  std::erase_if(out, [](const auto& status) { return status.model == nullptr && !status.loading; });
  return out;
}

std::vector<ModelStatus> ModelStore::ListKnown() const {
  std::vector<ModelStatus> out;
  MutexLock lock(&mu_);
  for (const auto& [name, entry] : entries_) out.push_back(MakeStatus(name, entry));
  return out;
}

std::vector<ModelStatus> ModelStore::List() const {
  std::map<std::string, ModelStatus> out;
  if (const auto found = folders_.ListModels(); found.ok()) {
    for (const auto& [name, opened] : *found) {
      const ModelState state = opened.ok() ? ModelState::kUnloaded : ModelState::kFailed;
      out[name] = {name, state, std::string(ClipUtf8(opened.message(), kMaxMessageBytes)), nullptr};
    }
  }
  for (ModelStatus& status : ListKnown()) out[status.name] = std::move(status);
  std::vector<ModelStatus> list;
  for (auto& [name, status] : out) list.push_back(std::move(status));
  return list;
}

bool ModelStore::AnyServedWhole() const {
  MutexLock lock(&mu_);
  bool any = false;
  for (const auto& [name, entry] : entries_) {
    if (entry.model == nullptr) continue;
    if (model::FindLosses(*entry.model).weights == 0) return true;
    any = true;
  }
  return !any;
}

int64_t ModelStore::device_bytes(const Device* device) const {
  MutexLock lock(&mu_);
  int64_t bytes = 0;
  for (const auto& [name, entry] : entries_) {
    if (entry.model == nullptr) continue;
    const auto it = entry.model->bytes_on.find(device);
    if (it != entry.model->bytes_on.end()) bytes += it->second;
  }
  return bytes;
}

}  // namespace awqd::repository
