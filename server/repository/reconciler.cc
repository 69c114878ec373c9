// One pass over the folders, model by model.
#include "server/repository/reconciler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/obs/logging.h"
#include "server/repository/startup_loads.h"

namespace awqd::repository {
namespace {

// A model that found no room may find some when other models are gone.
constexpr absl::Duration kRetry = absl::Minutes(1);

}  // namespace

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

bool Reconciler::IsWanted(const std::string& name, const ModelStatus& status) const {
  return only_.empty() || only_.contains(name) || status.model != nullptr;
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
  if (status.explicitly_unloaded || status.unloaded_idle || !IsWanted(name, status)) return;
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
  if (reason != seen->reported) LogNotLoaded(name, model.status(), served);
  seen->reported = std::move(reason);
}

}  // namespace awqd::repository
