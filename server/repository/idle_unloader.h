// IdleUnloader: unloads models that nobody uses, so that their memory serves others. The next
// request that names one loads it again (load_on_demand.h).
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
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

}  // namespace awqd::repository
