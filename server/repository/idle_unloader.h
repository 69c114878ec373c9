// IdleModels: lets models sleep that nobody uses, so that their memory serves others. The next
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
  // `pinned` stay whatever happens. `store` outlives it.
  IdleModels(absl::Duration limit, const std::vector<std::string>& pinned, model::ModelStore* store)
      : limit_(limit), pinned_(pinned.begin(), pinned.end()), store_(store) {}

  // Unloads what has computed nothing since a look that was `limit` before `now` or earlier, and
  // logs each. A request counts when it was computed; one that is under way keeps the weights that
  // it needs, whatever is unloaded.
  void Look(absl::Time now);
  // How often to look, so that a model stays hardly longer than it should.
  absl::Duration interval() const;

 private:
  struct Seen {
    int64_t version = 0, requests = 0;
    absl::Time since;  // they are that
  };
  const absl::Duration limit_;
  const std::set<std::string> pinned_;
  model::ModelStore* const store_;
  std::map<std::string, Seen> seen_;
};

}  // namespace awqd
