// UnixSockets: the files of the Unix domain sockets that a server listens on.
//
// It removes only a dead socket from a path before one is bound there, sets the permissions, and
// removes the file at the end.
//
// Attacker: another user of the machine, who connects before the permissions are set or puts a file
// in the way. Shown by tests/e2e/unix_socket_e2e_test.
#pragma once

#include <sys/types.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/unique_fd.h"

namespace awqd::transport {

// Not thread-safe.
class UnixSockets {
 public:
  // `mode`: permissions of the files. A user who may write to one may connect.
  explicit UnixSockets(mode_t mode) : mode_(mode) {}
  ~UnixSockets();
  UnixSockets(const UnixSockets&) = delete;
  UnixSockets& operator=(const UnixSockets&) = delete;

  // Checks that a socket can be bound at `path`, and removes one there that no server listens on.
  // From now on until Bound no other awqd can claim a path of that directory, and files that this
  // process creates are its own user's alone. UNAVAILABLE when a server listens there,
  // INVALID_ARGUMENT when something else is there or the directory cannot be written.
  absl::Status Claim(const std::string& path);

  // To be called once the claimed sockets listen: sets the permissions and lets others claim.
  absl::Status Bound();

  // Removes the files of Bound, unless something else has taken their place. To be called while
  // they still listen: the number that tells them apart is given to another file afterwards.
  void Remove();

 private:
  struct File {
    std::string path;
    dev_t device = 0;
    ino_t inode = 0;
    bool bound = false;
  };

  absl::Status LockDirectoryOf(const std::string& path);
  void Unlock();

  const mode_t mode_;
  std::vector<File> files_;
  std::set<std::pair<std::pair<dev_t, ino_t>, std::string>> names_;  // claimed, by directory
  std::set<std::pair<dev_t, ino_t>> locked_;
  std::vector<UniqueFd> locks_;  // open directories, locked until Bound
  bool narrowed_ = false;        // the umask
  mode_t umask_ = 0;             // the one before
};

}  // namespace awqd::transport
