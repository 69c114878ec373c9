// OpenConnections: which connections of the server are open, and from where.
//
// gRPC owns the descriptors and closes them without saying so. A second descriptor of each
// connection would tell, and would cost as many again; so a connection is known by its number and
// its socket's cookie, which the kernel gives to no other socket, and the table looks at them when
// a limit is reached.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace awqd::transport {

// Thread-safe.
class OpenConnections {
 public:
  enum class Verdict { kWelcome, kTooMany, kTooManyOfOrigin };

  OpenConnections(int64_t most, int64_t most_of_origin)
      : most_(most), most_of_origin_(most_of_origin) {}

  // Takes `fd` in, unless a limit is reached. What is not taken in is the caller's to close.
  Verdict Add(int fd, const std::string& origin);
  // The caller closes `fd` next.
  void Remove(int fd);
  // That are open.
  int64_t Count();
  // Ends all that are open: their owner reads the end of the stream, and closes them.
  void Cut();
  // Resets that of one peer, as gRPC spells it. False when there is none of that name.
  bool Cut(const std::string& peer);
  struct Crowd {
    int64_t waiting = 0;  // calls that nobody has read, in all connections
    int64_t reset = 0;    // connections
  };
  // Resets connections of `origin` in which more than `few` calls wait, when more than `per_peer`
  // beyond the few of each connection do in all of them.
  Crowd ResetCrowd(const std::string& origin, int64_t per_peer, int64_t few);
  // Those that MachineOf calls `peer`.
  std::vector<std::string> OriginsOf(const std::string& peer);
  // How long nothing has been on the way between that peer and this process, either way; zero while
  // the peer's kernel has not acknowledged everything. Infinite when there is none of that name.
  absl::Duration StillFor(const std::string& peer);

 private:
  struct Entry {
    uint64_t cookie = 0;
    std::string origin;
  };

  // Of that peer; -1 when there is none.
  int DescriptorOf(const std::string& peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Verdict Judge(const std::string& origin) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Forget(int fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Forgets those that were closed.
  void Sweep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t most_, most_of_origin_;
  Mutex mu_;
  std::unordered_map<int, Entry> connections_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int64_t> origins_ ABSL_GUARDED_BY(mu_);
  absl::Time swept_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace awqd::transport
