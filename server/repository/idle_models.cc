// Compares counts of requests between two calls; one load, and the list of those who wait for it.
#include "server/repository/idle_models.h"

#include <algorithm>

#include "server/obs/logging.h"

namespace awqd::repository {

absl::Duration IdleUnloader::interval() const {
  return std::clamp(limit_ / 8, absl::Milliseconds(50), absl::Seconds(1));
}

void IdleUnloader::UnloadIdleModels(absl::Time now) {
  std::map<std::string, Seen> seen;
  for (const ModelStatus& status : store_->ListServed()) {
    if (status.model == nullptr || pinned_.contains(status.name)) continue;
    Seen current = {status.model->version, status.statistics->requests, now};
    const auto before = seen_.find(status.name);
    if (before != seen_.end() && before->second.version == current.version &&
        before->second.requests == current.requests) {
      current.since = before->second.since;
    }
    if (now - current.since >= limit_ &&
        store_->UnloadIdle(status.name, current.version, current.requests)) {
      obs::LogEvent(obs::LogLevel::kInfo, "unloaded",
                    {{"model", status.name}, {"why", "it was not used"}});
      continue;
    }
    seen[status.name] = current;
  }
  seen_ = std::move(seen);
}

absl::Status LoadOnDemand::Request(absl::string_view model, Then then) {
  MutexLock lock(&mu_);
  const auto it = waiting_.find(model);
  if (it != waiting_.end()) {
    it->second.push_back(std::move(then));
    return absl::OkStatus();
  }
  const std::string name(model);
  // Under the lock, so that the next call finds the load only if it was accepted.
  const absl::Status accepted = queue_([this, name] { RunLoad(name); });
  if (accepted.ok()) waiting_[name].push_back(std::move(then));
  return accepted;
}

void LoadOnDemand::RunLoad(const std::string& model) {
  const absl::Status status = load_(model);
  std::vector<Then> waiting;
  {
    MutexLock lock(&mu_);
    const auto it = waiting_.find(model);
    waiting = std::move(it->second);
    waiting_.erase(it);
  }
  for (const Then& then : waiting) then(status);
}

}  // namespace awqd::repository
