// One load, and the list of those who wait for it.
#include "server/repository/load_on_demand.h"

namespace awqd::repository {

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
