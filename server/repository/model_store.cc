// Names, versions and the atomic swap. Nothing slow happens under the lock, freeing included.
#include "server/model/model_store.h"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "server/model/losses.h"
#include "server/model/model_loader.h"

namespace awqd::model {
namespace {

// One model's message must not crowd the others out of ListModels.
constexpr size_t kMaxMessageBytes = 1024;

constexpr absl::string_view kAsleep =
    "unloaded because it was not used; the next request that names it loads it";

// Up to five paths, the most similar ones first.
std::string Suggestions(const PathIndex& paths, absl::string_view wanted) {
  return absl::StrJoin(paths.MostLike(wanted), ", ", [](std::string* out, absl::string_view path) {
    absl::StrAppend(out, Quoted(path));
  });
}

// Why the model has no weight of that path.
std::string NoWeight(const Model& model, absl::string_view wanted) {
  const std::string others = Suggestions(model.weight_paths, wanted);
  const auto stack = model.stacks.find(wanted);
  if (stack == model.stacks.end()) {
    return absl::StrCat("no weight ", Quoted(wanted), " among ", model.weights.size(),
                        "; there are ", others);
  }
  if (!stack->second.ok()) {
    return absl::StrCat("got the path of a stack, expected one weight such as ", others, "; ",
                        stack->second.status().message());
  }
  const size_t experts = (*stack->second)->experts.size();
  return absl::StrCat("got ", Quoted(wanted), ", a stack of ", experts,
                      experts == 1 ? " expert" : " experts",
                      " that GroupedQuantizedMatmul takes, expected one weight such as ", others);
}

// Why the model has no stack of that path.
std::string NoStack(const Model& model, absl::string_view wanted) {
  const std::string others =
      model.stacks.empty() ? "the model has none"
                           : absl::StrCat("there are ", Suggestions(model.stack_paths, wanted));
  if (model.weights.find(wanted) == model.weights.end()) {
    return absl::StrCat("no stack ", Quoted(wanted), " among ", model.stacks.size(), "; ", others);
  }
  const std::optional<ExpertPath> expert = ParseExpertPath(wanted);
  return absl::StrCat(
      "got the path of one weight, ", Quoted(wanted), ", expected a stack",
      expert ? absl::StrCat(" such as ", Quoted(expert->stack)) : absl::StrCat("; ", others));
}

}  // namespace

ModelStore::ModelStore(ModelFolders folders, std::vector<Device*> devices, Sharding sharding,
                       ProgressLog log, ProgressLog bar)
    : folders_(std::move(folders)),
      devices_(std::move(devices)),
      sharding_(sharding),
      log_(std::move(log)),
      bar_(std::move(bar)) {}

absl::StatusOr<ModelStore::Begun> ModelStore::BeginLoad(absl::string_view name, LoadFor whom) {
  const bool for_client = whom == LoadFor::kClient;
  MutexLock lock(&mu_);
  if (for_client) {
    if (auto joined = JoinLoad(name); joined != nullptr) return Begun{.joined = std::move(joined)};
  } else if (const auto it = entries_.find(name); it != entries_.end() && it->second.kept_out) {
    return absl::AbortedError(absl::StrCat("model \"", name, "\": a client has unloaded it"));
  }
  if (cancelled_) return absl::UnavailableError("the server is shutting down");
  Entry& entry = entries_[std::string(name)];
  if (entry.loading != nullptr) {
    return absl::AlreadyExistsError(
        absl::StrCat("model \"", name, "\": a load of it is in progress"));
  }
  if (for_client) entry.kept_out = false;
  entry.loading = std::make_shared<LoadState>();
  entry.loading->for_client = for_client;
  return Begun{entry.loading, entry.use};
}

absl::StatusOr<std::vector<Device*>> ModelStore::Targets() const {
  std::vector<Device*> working;
  std::copy_if(devices_.begin(), devices_.end(), std::back_inserter(working),
               [](const Device* device) { return device->healthy(); });
  if (working.empty()) return absl::FailedPreconditionError("every device has failed");
  if (sharding_ != Sharding::kModels) return working;
  return std::vector<Device*>{*std::max_element(
      working.begin(), working.end(),
      [](const Device* a, const Device* b) { return a->FreeBytes() < b->FreeBytes(); })};
}

absl::StatusOr<std::shared_ptr<Model>> ModelStore::LoadFromDisk(const std::string& name,
                                                                const Begun& begun,
                                                                bool* seen) const {
  const absl::StatusOr<ModelFolder> located = folders_.Locate(name, seen);
  // Before anything is read: what changes from here on is found different by a later look.
  begun.state->files = ModelFolders::LookOf(located).files;
  AWQD_ASSIGN_OR_RETURN(const ModelFolder folder, located);
  AWQD_ASSIGN_OR_RETURN(std::vector<Device*> targets, Targets());
  AWQD_ASSIGN_OR_RETURN(
      std::shared_ptr<Model> model,
      LoadModel(folder, name, {std::move(targets), sharding_, begun.use}, cancelled_,
                {log_, bar_, &begun.state->share, &begun.state->planned_bytes}));
  if (before_serving_) AWQD_RETURN_IF_ERROR(before_serving_(*model));
  return model;
}

absl::StatusOr<std::shared_ptr<const Model>> ModelStore::EndLoad(
    absl::string_view name, const Begun& begun, bool seen,
    absl::StatusOr<std::shared_ptr<Model>> loaded) {
  std::shared_ptr<const Model> old;  // outlives the lock: freeing a model takes long
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
  entry.asleep = entry.asleep && !loaded.ok() && (begun.state->for_client || passes);
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

absl::StatusOr<std::shared_ptr<const Model>> ModelStore::Load(absl::string_view name) {
  return RunLoad(name, LoadFor::kClient);
}

absl::StatusOr<std::shared_ptr<const Model>> ModelStore::RunLoad(absl::string_view name,
                                                                 LoadFor whom) {
  AWQD_RETURN_IF_ERROR(CheckModelName(name));
  const std::string no_memory =
      absl::StrCat("model \"", name, "\": host memory ran out while it was loaded");
  AWQD_ASSIGN_OR_RETURN(const Begun begun, BeginLoad(name, whom));
  if (begun.joined != nullptr) return begun.joined;
  const absl::Time start = absl::Now();
  bool seen = false;
  // Whatever happens, the load that has begun must end. A thread that cannot be started throws
  // another exception than an allocation that fails.
  const auto load = [&]() -> absl::StatusOr<std::shared_ptr<Model>> {
    try {
      return LoadFromDisk(std::string(name), begun, &seen);
    } catch (const std::bad_alloc&) {
      return OutOfMemory(no_memory);
    } catch (const std::exception& error) {
      return absl::InternalError(absl::StrCat("model \"", name, "\": ", error.what()));
    }
  };
  absl::StatusOr<std::shared_ptr<Model>> loaded = load();
  (loaded.ok() ? loads_ : failed_loads_).Observe(absl::ToInt64Nanoseconds(absl::Now() - start));
  return EndLoad(name, begun, seen, std::move(loaded));
}

absl::StatusOr<std::shared_ptr<const Model>> ModelStore::LoadUnlessServed(absl::string_view name) {
  for (;;) {
    {
      MutexLock lock(&mu_);
      for (auto it = entries_.find(name); it != entries_.end(); it = entries_.find(name)) {
        if (it->second.model != nullptr) return it->second.model;
        if (it->second.loading == nullptr || cancelled_) break;
        load_ended_.Wait(&mu_);
      }
    }
    auto model = Load(name);
    // Another load may have begun in between: it is waited for as well.
    if (!absl::IsAlreadyExists(model.status())) return model;
  }
}

absl::Status ModelStore::Unload(absl::string_view name) {
  AWQD_RETURN_IF_ERROR(CheckModelName(name));
  std::shared_ptr<const Model> old;
  MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  const bool known = it != entries_.end();
  const bool coming = known && it->second.loading != nullptr && !it->second.loading->for_client &&
                      !it->second.loading->unwanted;
  if (!known || (it->second.model == nullptr && !it->second.asleep && !coming)) {
    return absl::NotFoundError(absl::StrCat("model \"", name, "\": not loaded"));
  }
  Entry& entry = it->second;
  old = std::exchange(entry.model, nullptr);
  entry.message.clear();
  entry.asleep = false;
  entry.kept_out = true;
  if (coming) entry.loading->unwanted = true;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Model>> ModelStore::Find(absl::string_view name) const {
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
  if (entry.asleep) {
    return absl::UnavailableError(absl::StrCat("model \"", name, "\": ", kAsleep));
  }
  return absl::NotFoundError(absl::StrCat(
      "model \"", name, "\": not loaded",
      entry.message.empty() ? "" : absl::StrCat("; its last load failed: ", entry.message)));
}

absl::StatusOr<std::shared_ptr<const PlacedWeight>> ModelStore::FindWeight(
    absl::string_view model, absl::string_view weight) const {
  AWQD_ASSIGN_OR_RETURN(const std::shared_ptr<const Model> found, Find(model));
  const auto it = found->weights.find(weight);
  if (it != found->weights.end()) return it->second;
  return absl::NotFoundError(absl::StrCat("model \"", model, "\": ", NoWeight(*found, weight)));
}

absl::StatusOr<std::shared_ptr<const WeightStack>> ModelStore::FindStack(
    absl::string_view model, absl::string_view stack) const {
  AWQD_ASSIGN_OR_RETURN(const std::shared_ptr<const Model> found, Find(model));
  const std::string prefix = absl::StrCat("model \"", model, "\"");
  const auto it = found->stacks.find(stack);
  if (it == found->stacks.end()) {
    return absl::NotFoundError(absl::StrCat(prefix, ": ", NoStack(*found, stack)));
  }
  if (!it->second.ok()) return Prefixed(prefix, it->second.status());
  return *it->second;
}

ModelStatus ModelStore::StatusOf(const std::string& name, const Entry& entry) {
  ModelStatus status = {name, ModelState::kUnloaded, entry.message, entry.model, entry.use};
  status.loaded_share = entry.loading != nullptr ? entry.loading->share.load()
                        : entry.model != nullptr ? 1.0f
                                                 : 0.0f;
  if (entry.loading != nullptr) status.planned_bytes = entry.loading->planned_bytes;
  status.loading = entry.loading != nullptr;
  status.asleep = entry.asleep;
  status.kept_out = entry.kept_out;
  status.tried = entry.tried;
  if (entry.model != nullptr) {
    const Losses losses = LossesOf(*entry.model);
    status.state = losses.weights > 0 ? ModelState::kFailed : ModelState::kReady;
    if (status.message.empty()) status.message = losses.Message();
  } else if (entry.loading != nullptr) {
    status.state = ModelState::kLoading;
  } else if (entry.asleep) {
    if (status.message.empty()) status.message = std::string(kAsleep);
  } else if (!entry.message.empty()) {
    status.state = ModelState::kFailed;
  }
  return status;
}

std::vector<ModelStatus> ModelStore::Served() const {
  std::vector<ModelStatus> out;
  MutexLock lock(&mu_);
  for (const auto& [name, entry] : entries_) {
    if (entry.model != nullptr || entry.loading != nullptr) out.push_back(StatusOf(name, entry));
  }
  return out;
}

std::vector<ModelStatus> ModelStore::List() const {
  std::map<std::string, ModelStatus> out;
  if (const auto found = folders_.Find(); found.ok()) {
    for (const auto& [name, opened] : *found) {
      const ModelState state = opened.ok() ? ModelState::kUnloaded : ModelState::kFailed;
      out[name] = {name, state, std::string(ClipUtf8(opened.message(), kMaxMessageBytes)), nullptr};
    }
  }
  MutexLock lock(&mu_);
  for (const auto& [name, entry] : entries_) {
    out[name] = StatusOf(name, entry);
  }
  std::vector<ModelStatus> list;
  for (auto& [name, status] : out) list.push_back(std::move(status));
  return list;
}

bool ModelStore::AnyWhole() const {
  MutexLock lock(&mu_);
  bool any = false;
  for (const auto& [name, entry] : entries_) {
    if (entry.model == nullptr) continue;
    if (LossesOf(*entry.model).weights == 0) return true;
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

}  // namespace awqd::model
