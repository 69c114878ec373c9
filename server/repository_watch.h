// RepositoryWatch: keeps what is served like what the models' folders hold.
//
// It looks at folders again and again, and does not only wait for inotify: that tells nothing of
// what other machines write over NFS, nor of a link above a folder that is made to lead elsewhere,
// and loses events when there are many. A look opens each file and compares inode, size and times.
//
// Of each model, at a look:
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
  absl::Duration interval = absl::Seconds(5);  // between two looks
  // For so long a model's files must not have changed before they are loaded.
  absl::Duration settle = absl::Seconds(10);
};

// Used by one thread at a time.
class RepositoryWatch {
 public:
  // `only`: models of the repository that are loaded though nobody has asked for them; empty: all.
  // What clients have loaded is followed too. `store` outlives it.
  RepositoryWatch(absl::Duration settle, const std::vector<std::string>& only,
                  model::ModelStore* store)
      : settle_(settle), only_(only.begin(), only.end()), store_(store) {}

  struct Result {
    int loaded = 0;
    int failed = 0;
    int waiting = 0;  // to stand still
  };
  // Loads and unloads what has to be at `now`, on the calling thread, and logs each. At the first
  // look files have stood still since they were last written to, later since the look that found
  // them changed: times of other machines say little.
  Result Look(absl::Time now);

 private:
  struct Seen {
    model::FolderState look;
    absl::Time since;                           // it looks like that
    absl::Time retry = absl::InfiniteFuture();  // after there was no room
    std::string reported;                       // why it could not be loaded
  };
  // Whether the repository can be told from one that is not there.
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
  std::string identity_;  // of the repository, when a model was last found there
  std::string trouble_;   // with the repository, as it was reported
};

}  // namespace awqd
