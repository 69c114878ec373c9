// Polls the repository, model by model.
#include "server/repository_watch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/obs/logging.h"
#include "server/start_models.h"

namespace awqd {
namespace {

// A model without room is tried again after this time, because other models may be gone.
constexpr absl::Duration kRetry = absl::Minutes(1);

}  // namespace

bool RepositoryWatch::Trusted(size_t found) {
  const std::string now = store_->folders().RepositoryIdentity();
  if (found > 0 || now == identity_ || identity_.empty()) {
    identity_ = now;
    return true;
  }
  return false;
}

RepositoryWatch::Result RepositoryWatch::Look(absl::Time now) {
  // Read before the disk, so that a model that is loaded meanwhile is not compared with older
  // files.
  std::map<std::string, model::ModelStatus> models;
  for (model::ModelStatus& status : store_->Known()) models[status.name] = std::move(status);
  const auto found = store_->folders().Find();
  std::string trouble;
  if (!found.ok()) {
    trouble = std::string(found.status().message());
  } else if (!Trusted(found->size())) {
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
  for (const auto& [name, status] : models) LookAt(name, status, now, &result);
  first_ = false;
  return result;
}

bool RepositoryWatch::Wanted(const std::string& name, const model::ModelStatus& status) const {
  return only_.empty() || only_.contains(name) || status.model != nullptr;
}

void RepositoryWatch::LookAt(const std::string& name, const model::ModelStatus& status,
                             absl::Time now, Result* result) {
  model::FolderLook look = store_->folders().Look(name);
  const auto [it, fresh] = seen_.try_emplace(name);
  Seen& seen = it->second;
  if (fresh || !seen.look.SameAs(look)) {
    seen = {.look = look, .since = first_ ? std::min(now, look.changed) : now};
  }
  if (status.loading) return;
  const bool still = now - seen.since >= settle_;
  if (!look.there) {
    const int64_t version = status.model == nullptr ? 0 : status.model->version;
    if (still && store_->Drop(name, version)) {
      obs::LogEvent(obs::LogLevel::kInfo, "unloaded",
                    {{"model", name}, {"why", "its folder is gone"}});
    }
    return;
  }
  if (status.kept_out || status.asleep || !Wanted(name, status)) return;
  if (look.files == status.tried && now < seen.retry) return;
  if (still) {
    Load(name, status.model != nullptr, now, &seen, result);
  } else {
    ++result->waiting;
  }
}

void RepositoryWatch::Load(const std::string& name, bool served, absl::Time now, Seen* seen,
                           Result* result) {
  const auto model = store_->Refresh(name);
  seen->retry = absl::InfiniteFuture();
  if (model.ok()) {
    seen->reported.clear();
    LogLoaded(**model);
    ++result->loaded;
    return;
  }
  // A client was faster, or the server is stopping.
  if (absl::IsAborted(model.status()) || absl::IsAlreadyExists(model.status())) return;
  if (absl::IsUnavailable(model.status())) return;
  ++result->failed;
  if (absl::IsResourceExhausted(model.status())) seen->retry = now + kRetry;
  std::string reason(model.status().message());
  if (reason != seen->reported) LogNotLoaded(name, model.status(), served);
  seen->reported = std::move(reason);
}

}  // namespace awqd
