// RepositoryWatch: keeps the served models up to date with the models' folders.
//
// It polls folders instead of using inotify alone. inotify reports neither writes of other machines
// over NFS nor a changed link above a folder, and it loses events under load. A poll opens each
// file and compares inode, size and times.
//
// A poll treats each model as follows:
//   new, or with other files than when it was last loaded   loaded, once all files have stood still
//   it cannot be loaded            what was served goes on; tried again when its files change,
//                                  and after a minute where there was no room for it
//   its folder is gone             unloaded, once it has been gone as long
//   a client has unloaded it       left alone until a client loads it
//   a load of it is in progress    left alone until that has ended
//   asleep (IdleModels)            left alone; its next use loads what is there then
// While the repository cannot be read, and while another, empty directory is in its place (a file
// system was unmounted), nothing is unloaded.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/model/model_store.h"

namespace awqd {

struct WatchOptions {
  bool on = false;
  absl::Duration interval = absl::Seconds(5);  // between two polls
  // The time for which a model's files must not have changed before they are loaded.
  absl::Duration settle = absl::Seconds(10);
};

// Used by one thread at a time.
class RepositoryWatch {
 public:
  // `only`: models of the repository that are loaded although no client asked for them; empty: all.
  // Models that clients have loaded are reconciled too. `store` outlives this object.
  RepositoryWatch(absl::Duration settle, const std::vector<std::string>& only,
                  model::ModelStore* store)
      : settle_(settle), only_(only.begin(), only.end()), store_(store) {}

  struct Result {
    int loaded = 0;
    int failed = 0;
    int waiting = 0;  // models whose files changed too recently
  };
  // Loads and unloads models as needed at `now`, on the calling thread, and logs each. At the first
  // poll, files count as unchanged since their last write; later, since the poll that found them
  // changed, because times of other machines are not reliable.
  Result Look(absl::Time now);

 private:
  struct Seen {
    model::FolderLook look;
    absl::Time since;                           // time since when it has looked so
    absl::Time retry = absl::InfiniteFuture();  // when to try again after a lack of room
    std::string reported;                       // the logged reason of a failed load
  };
  // Whether the repository is really there, rather than an empty mount point.
  bool Trusted(size_t found);
  bool Wanted(const std::string& name, const model::ModelStatus& status) const;
  void LookAt(const std::string& name, const model::ModelStatus& status, absl::Time now,
              Result* result);
  void Load(const std::string& name, bool served, absl::Time now, Seen* seen, Result* result);

  const absl::Duration settle_;
  const std::set<std::string> only_;
  model::ModelStore* const store_;
  std::map<std::string, Seen> seen_;
  bool first_ = true;
  std::string identity_;  // identity of the repository when a model was last found in it
  std::string trouble_;   // the logged problem of the repository
};

}  // namespace awqd
