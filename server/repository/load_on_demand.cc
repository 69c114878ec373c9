// One load, and all who wait for it.
#include "server/services/waking.h"

#include <utility>

#include "server/obs/logging.h"
#include "server/transport/guard.h"
#include "server/wire/status.h"

namespace awqd::services {

absl::Status Waking::Wake(absl::string_view model, Then then) {
  MutexLock lock(&mu_);
  const auto it = waiting_.find(model);
  if (it != waiting_.end()) {
    it->second.push_back(std::move(then));
    return absl::OkStatus();
  }
  const std::string name(model);
  // Under the lock, so that whoever comes next finds the load only if it was accepted.
  const absl::Status accepted = loads_->Run([this, name] { Load(name); });
  if (accepted.ok()) waiting_[name].push_back(std::move(then));
  return accepted;
}

void Waking::Load(const std::string& model) {
  const absl::Status status =
      wire::ForClient(transport::Guarded([&] { return models_->Wake(model).status(); }));
  obs::LogLimited(status.ok() ? obs::LogLevel::kInfo : obs::LogLevel::kWarning, "load on use",
                  {{"model", obs::LogText(model)},
                   {"status", absl::StatusCodeToString(status.code())},
                   {"error", obs::LogText(status.message(), wire::kMaxErrorBytes)}});
  std::vector<Then> waiting;
  {
    MutexLock lock(&mu_);
    const auto it = waiting_.find(model);
    waiting = std::move(it->second);
    waiting_.erase(it);
  }
  for (const Then& then : waiting) then(status);
}

}  // namespace awqd::services
