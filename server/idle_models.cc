// Finds idle models by comparing counts of requests.
#include "server/idle_models.h"

#include <algorithm>

#include "server/obs/logging.h"

namespace awqd {

absl::Duration IdleModels::interval() const {
  return std::clamp(limit_ / 8, absl::Milliseconds(50), absl::Seconds(1));
}

void IdleModels::Look(absl::Time now) {
  std::map<std::string, Seen> seen;
  for (const model::ModelStatus& status : store_->Served()) {
    if (status.model == nullptr || pinned_.contains(status.name)) continue;
    Seen current = {status.model->version, status.use->requests, now};
    const auto before = seen_.find(status.name);
    if (before != seen_.end() && before->second.version == current.version &&
        before->second.requests == current.requests) {
      current.since = before->second.since;
    }
    if (now - current.since >= limit_ &&
        store_->LetSleep(status.name, current.version, current.requests)) {
      obs::LogEvent(obs::LogLevel::kInfo, "unloaded",
                    {{"model", status.name}, {"why", "it was not used"}});
      continue;
    }
    seen[status.name] = current;
  }
  seen_ = std::move(seen);
}

}  // namespace awqd
