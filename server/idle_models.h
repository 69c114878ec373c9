// IdleModels: unloads models that are not used, so that others can use their memory. The next
// request that names one loads it again (services/waking.h).
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/model/model_store.h"

namespace awqd {

// Used by one thread.
class IdleModels {
 public:
  // `pinned` models are never unloaded. `store` outlives this object.
  IdleModels(absl::Duration limit, const std::vector<std::string>& pinned, model::ModelStore* store)
      : limit_(limit), pinned_(pinned.begin(), pinned.end()), store_(store) {}

  // Unloads the models that have computed nothing since a poll that was `limit` before `now` or
  // earlier, and logs each. A request counts when it was computed; a running request keeps the
  // weights that it needs, although its model is unloaded.
  void Look(absl::Time now);
  // The interval of polls, short enough that a model stays hardly longer than `limit`.
  absl::Duration interval() const;

 private:
  struct Seen {
    int64_t version = 0, requests = 0;
    absl::Time since;  // time from which it has been so
  };
  const absl::Duration limit_;
  const std::set<std::string> pinned_;
  model::ModelStore* const store_;
  std::map<std::string, Seen> seen_;
};

}  // namespace awqd
