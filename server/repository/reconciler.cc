// Chooses, loads and reports the models at start; then one pass over the folders, model by model.
#include "server/repository/reconciler.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"

namespace awqd::repository {
namespace {

// A model that found no room may find some when other models are gone.
constexpr absl::Duration kRetry = absl::Minutes(1);
// The most bytes of one reason in the log and in the line that a server ends with.
constexpr size_t kMaxReasonBytes = 1024;

void LogFailure(absl::string_view what, const std::string& name, const absl::Status& status) {
  obs::LogEvent(obs::LogLevel::kWarning, what,
                {{"model", name},
                 {"status", absl::StatusCodeToString(status.code())},
                 {"error", obs::LogText(status.message(), kMaxReasonBytes)}});
}

void LogLoaded(const model::Model& model) {
  obs::LogEvent(obs::LogLevel::kInfo, "loaded",
                {{"model", model.name},
                 {"version", model.version},
                 {"weights", model.weights.size()},
                 {"ignored_tensors", model.ignored_tensors},
                 {"unserved_weights", model.unserved.size()},
                 {"device_bytes", model.device_bytes},
                 {"load_ms", model.load_ms}});
}

}  // namespace

// --- At start ---

absl::StatusOr<std::vector<std::string>> ChooseModels(const std::vector<std::string>& load_models,
                                                      bool may_be_empty, const ModelStore& store) {
  constexpr absl::string_view kFlag = "--model_repository";
  const auto found = store.folders().ListModels();
  if (!found.ok()) return Prefixed(kFlag, found.status());
  for (const std::string& line : store.folders().Warnings()) {
    obs::LogEvent(obs::LogLevel::kWarning, line, {});
  }
  AWQD_RETURN_IF_ERROR(Prefixed(kFlag, store.folders().CheckRepository(may_be_empty)));
  std::vector<std::string> all;
  for (const auto& [name, opened] : *found) {
    all.push_back(name);
    if (!opened.ok()) LogFailure("model cannot be opened", name, opened);
  }
  // Models that cannot be opened too: their loads fail, rather than be missing in silence.
  if (load_models.empty()) return all;
  std::vector<std::string> wanted;
  for (const NamedFolder& folder : store.folders().named()) wanted.push_back(folder.name);
  for (const std::string& name : load_models) {
    AWQD_RETURN_IF_ERROR(Prefixed("--load_model", CheckModelName(name)));
    if (!absl::c_linear_search(wanted, name)) wanted.push_back(name);
  }
  return wanted;
}

absl::Status LoadedAtStart::Error() const {
  if (failed.empty()) return absl::OkStatus();
  if (failed.size() == 1) return failed.front();
  const std::string reasons =
      absl::StrJoin(failed, "; ", [](std::string* out, const absl::Status& status) {
        out->append(obs::LogText(status.message(), kMaxReasonBytes));
      });
  return absl::Status(failed.front().code(),
                      absl::StrCat(failed.size(), " of ", failed.size() + loaded,
                                   " models cannot be loaded: ", reasons));
}

LoadedAtStart LoadAtStart(const std::vector<std::string>& names, const std::atomic<bool>& stopping,
                          ModelStore* store) {
  LoadedAtStart out;
  std::vector<std::string> failed;
  for (const std::string& name : names) {
    // A reload needs room for both versions.
    const absl::StatusOr<std::shared_ptr<const model::Model>> model = store->LoadUnlessServed(name);
    if (stopping) return {};
    if (!model.ok()) {
      failed.push_back(name);
      out.failed.push_back(model.status());
      continue;
    }
    ++out.loaded;
    LogLoaded(**model);
  }
  for (size_t i = 0; i < failed.size(); ++i) {
    LogFailure("model cannot be loaded", failed[i], out.failed[i]);
  }
  return out;
}

// --- As the folders change ---

bool Reconciler::IsRepositoryThere(size_t found) {
  const std::string now = store_->folders().RepositoryIdentity();
  if (found > 0 || now == identity_ || identity_.empty()) {
    identity_ = now;
    return true;
  }
  return false;
}

Reconciler::Result Reconciler::Reconcile(absl::Time now) {
  // Before the disk is read, so that a model that is loaded meanwhile is not judged by older files.
  std::map<std::string, ModelStatus> models;
  for (ModelStatus& status : store_->ListKnown()) models[status.name] = std::move(status);
  const auto found = store_->folders().ListModels();
  std::string trouble;
  if (!found.ok()) {
    trouble = std::string(found.status().message());
  } else if (!IsRepositoryThere(found->size())) {
    trouble = "another directory is in its place, and empty; is a file system not mounted?";
  }
  if (!trouble.empty() && trouble != trouble_) {
    obs::LogEvent(obs::LogLevel::kWarning,
                  "the repository cannot be watched; models stay as they are",
                  {{"error", obs::LogText(trouble, 1024)}});
  }
  trouble_ = trouble;
  Result result;
  if (!trouble.empty()) return result;
  for (const auto& [name, opened] : *found) models.try_emplace(name);
  std::erase_if(seen_, [&](const auto& seen) { return !models.contains(seen.first); });
  for (const auto& [name, status] : models) ReconcileModel(name, status, now, &result);
  first_ = false;
  return result;
}

void Reconciler::ReconcileModel(const std::string& name, const ModelStatus& status, absl::Time now,
                                Result* result) {
  model::FolderState look = store_->folders().Inspect(name);
  const auto [it, fresh] = seen_.try_emplace(name);
  Seen& seen = it->second;
  if (fresh || !seen.look.SameAs(look)) {
    seen = {.look = look, .since = first_ ? std::min(now, look.changed) : now};
  }
  if (status.loading) return;
  const bool still = now - seen.since >= settle_;
  if (!look.there) {
    const int64_t version = status.model == nullptr ? 0 : status.model->version;
    if (still && store_->UnloadRemoved(name, version)) {
      obs::LogEvent(obs::LogLevel::kInfo, "unloaded",
                    {{"model", name}, {"why", "its folder is gone"}});
    }
    return;
  }
  const bool wanted = only_.empty() || only_.contains(name) || status.model != nullptr;
  if (status.explicitly_unloaded || status.unloaded_idle || !wanted) return;
  if (look.files == status.tried && now < seen.retry) return;
  if (still) {
    LoadModel(name, status.model != nullptr, now, &seen, result);
  } else {
    ++result->waiting;
  }
}

void Reconciler::LoadModel(const std::string& name, bool served, absl::Time now, Seen* seen,
                           Result* result) {
  const auto model = store_->Reconcile(name);
  seen->retry = absl::InfiniteFuture();
  if (model.ok()) {
    seen->reported.clear();
    LogLoaded(**model);
    ++result->loaded;
    return;
  }
  // An explicit request was quicker, or the server ends.
  if (absl::IsAborted(model.status()) || absl::IsAlreadyExists(model.status())) return;
  if (absl::IsUnavailable(model.status())) return;
  ++result->failed;
  if (absl::IsResourceExhausted(model.status())) seen->retry = now + kRetry;
  std::string reason(model.status().message());
  if (reason != seen->reported) {
    LogFailure(served ? "model cannot be loaded anew; the version before is served on"
                      : "model cannot be loaded",
               name, model.status());
  }
  seen->reported = std::move(reason);
}

}  // namespace awqd::repository
