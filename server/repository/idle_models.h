// Models that are idle: IdleUnloader unloads them so that their memory serves others, and
// LoadOnDemand loads them again for the next requests that name them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/repository/model_store.h"

namespace awqd::repository {

// Used by one thread.
class IdleUnloader {
 public:
  // Models in `pinned` are never unloaded here. `store` outlives this.
  IdleUnloader(absl::Duration limit, const std::vector<std::string>& pinned, ModelStore* store)
      : limit_(limit), pinned_(pinned.begin(), pinned.end()), store_(store) {}

  // Unloads, and logs, each model that has computed nothing since a call at `now` - `limit` or
  // earlier. A request counts once it was computed. A request under way keeps the weights that it
  // needs, whatever is unloaded.
  void UnloadIdleModels(absl::Time now);
  // The time between two calls that keeps a model hardly longer than the limit.
  absl::Duration interval() const;

 private:
  struct Seen {
    int64_t version = 0, requests = 0;
    absl::Time since;  // the two have not changed since
  };
  const absl::Duration limit_;
  const std::set<std::string> pinned_;
  ModelStore* const store_;
  std::map<std::string, Seen> seen_;
};

// Loads each model once for all calls that wait for it. Thread-safe.
class LoadOnDemand {
 public:
  // Loads one model (ModelStore::LoadOnDemand) and blocks until it has; does not throw.
  using Load = std::function<absl::Status(const std::string& model)>;
  // Runs a job on another thread. Never blocks; an error where the queue takes no more.
  using Queue = std::function<absl::Status(std::function<void()> job)>;
  // Whatever both use outlives this; the queue has run every job before this goes.
  LoadOnDemand(Load load, Queue queue) : load_(std::move(load)), queue_(std::move(queue)) {}

  // Calls `then` once with the end of the load, on a thread of the queue; `then` does not throw.
  // Never blocks. An error, and no call, where the queue takes no more.
  using Then = std::function<void(const absl::Status& loaded)>;
  absl::Status Request(absl::string_view model, Then then);

 private:
  void RunLoad(const std::string& model);

  const Load load_;
  const Queue queue_;
  Mutex mu_;
  // The calls that wait for a load that is under way, or about to be.
  std::map<std::string, std::vector<Then>, std::less<>> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::repository
