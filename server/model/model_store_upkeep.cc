// What the server does with models by itself: following their folders, and letting them sleep. In
// all of it a client that loads or unloads has its way.
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "server/model/model_store.h"

namespace awqd::model {

std::shared_ptr<const Model> ModelStore::JoinLoad(absl::string_view name) {
  while (!cancelled_) {
    auto it = entries_.find(name);
    if (it == entries_.end() || it->second.loading == nullptr) return nullptr;
    const std::shared_ptr<LoadState> theirs = it->second.loading;
    if (theirs->for_client) return nullptr;
    it->second.kept_out = false;
    // The entry may be gone when the lock is back.
    while (it != entries_.end() && it->second.loading == theirs && !cancelled_) {
      load_ended_.Wait(&mu_);
      it = entries_.find(name);
    }
    // The load has compared all files at its end: what it read was there when this was asked for.
    if (it != entries_.end() && theirs->served && it->second.model != nullptr) {
      return it->second.model;
    }
  }
  return nullptr;
}

absl::StatusOr<std::shared_ptr<const Model>> ModelStore::Refresh(absl::string_view name) {
  return RunLoad(name, LoadFor::kServer);
}

bool ModelStore::Drop(absl::string_view name, int64_t version) {
  std::shared_ptr<const Model> old;  // outlives the lock
  MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  if (it == entries_.end() || it->second.loading != nullptr) return false;
  Entry& entry = it->second;
  if ((entry.model == nullptr ? 0 : entry.model->version) != version) return false;
  const bool served = entry.model != nullptr || entry.asleep;
  old = std::exchange(entry.model, nullptr);
  entry.message.clear();
  entry.tried.clear();
  entry.asleep = false;
  if (entry.loads == 0) entries_.erase(it);
  return served;
}

bool ModelStore::LetSleep(absl::string_view name, int64_t version, int64_t requests) {
  std::shared_ptr<const Model> old;  // outlives the lock
  MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  if (it == entries_.end()) return false;
  Entry& entry = it->second;
  if (entry.model == nullptr || entry.loading != nullptr || entry.model->version != version ||
      entry.use->requests != requests) {
    return false;
  }
  old = std::exchange(entry.model, nullptr);
  entry.message.clear();
  entry.asleep = true;
  return true;
}

bool ModelStore::Asleep(absl::string_view name) const {
  MutexLock lock(&mu_);
  const auto it = entries_.find(name);
  return it != entries_.end() && it->second.asleep;
}

absl::StatusOr<std::shared_ptr<const Model>> ModelStore::Wake(absl::string_view name) {
  for (;;) {
    {
      MutexLock lock(&mu_);
      auto it = entries_.find(name);
      while (it != entries_.end() && it->second.model == nullptr && it->second.loading != nullptr &&
             !cancelled_) {
        load_ended_.Wait(&mu_);
        it = entries_.find(name);
      }
    }
    if (!Asleep(name)) return Find(name);
    auto model = RunLoad(name, LoadFor::kServer);
    // A client, or another call, was quicker: how that ends decides.
    if (!absl::IsAlreadyExists(model.status()) && !absl::IsAborted(model.status())) return model;
  }
}

std::vector<ModelStatus> ModelStore::Known() const {
  std::vector<ModelStatus> out;
  MutexLock lock(&mu_);
  for (const auto& [name, entry] : entries_) out.push_back(StatusOf(name, entry));
  return out;
}

}  // namespace awqd::model
