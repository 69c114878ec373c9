// OpenConnections: which connections of the server are open, and from where.
//
// gRPC owns the descriptors and closes them without saying so. A second descriptor of each
// connection would tell, and would cost as many again. So a connection is known by its number and
// by the cookie that the kernel gives to its socket and to no other. The table checks the cookies
// when a limit is reached.
//
// Attacker: peers that open connections and keep them. Shown by acceptor_test, and by `crowd` and
// `descriptors` of tests/attack.
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

// Bytes of HTTP/2's frames: RFC 9113, sections 4.1 and 4.2.
inline constexpr size_t kFrameHeader = 9;
inline constexpr size_t kLargestFrame = 16384;  // that a peer may send unasked

// The number that the kernel gives to this socket and to no other; 0 when `fd` is no socket.
uint64_t SocketCookie(int fd);

// How many calls begin in the first 64 KiB that nobody has read yet: their HEADERS frames. None are
// seen within TLS.
int64_t CountWaitingCalls(int fd);

// Resets the connection, and throws away what came of it and was not read: gRPC would go on with
// that for as long as there is some. False when its socket is not that of `cookie`.
bool ResetConnection(int fd, uint64_t cookie);

// Thread-safe.
class OpenConnections {
 public:
  enum class Verdict { kAdmitted, kTooMany, kTooManyOfOrigin };

  OpenConnections(int64_t limit, int64_t limit_per_origin)
      : limit_(limit), limit_per_origin_(limit_per_origin) {}

  // Adds `fd`, unless a limit is reached. The caller closes what is not added. `origin`: as
  // obs::Origin spells it.
  Verdict Add(int fd, const std::string& origin);
  // The caller closes `fd` next.
  void Remove(int fd);
  // How many are open. Checks each.
  int64_t Count();
  // Whether no TCP connection holds bytes that the peer's kernel has not acknowledged: closing one
  // that does may lose them. A Unix domain socket has nothing on the way.
  bool AllSent();
  // Ends all that are open, as if the clients had closed them: their owner reads the end of the
  // stream.
  void EndAll();
  // Resets the connection of one peer, as gRPC spells it: "ipv4:10.0.0.7:51034". False when there
  // is none of that name: clients of a socket file have no such one.
  bool ResetPeer(const std::string& peer);
  struct Crowd {
    int64_t waiting = 0;  // calls that nobody has read, in all connections
    int64_t reset = 0;    // connections
  };
  // Resets connections of `origin` in which more than `few` calls wait, when more than `per_peer`
  // beyond the few of each connection wait in all of them.
  Crowd ResetCrowd(const std::string& origin, int64_t per_peer, int64_t few);
  // The origins of a peer, as obs::PeerHost spells it.
  std::vector<std::string> OriginsOf(const std::string& peer);
  // Whether a peer, as gRPC spells it, is connected. True for clients of a socket file, which all
  // have the same name.
  bool IsConnected(const std::string& peer);
  // How long nothing has been on the way between that peer and this process, either way; zero while
  // the peer's kernel has not acknowledged everything. Infinite when there is none of that name.
  absl::Duration IdleTime(const std::string& peer);

 private:
  struct Entry {
    uint64_t cookie = 0;
    std::string origin;
  };

  // The descriptor of that peer; -1 when there is none.
  int FindDescriptor(const std::string& peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Verdict CheckLimits(const std::string& origin) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Forget(int fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Forgets those that were closed.
  void Sweep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t limit_, limit_per_origin_;
  Mutex mu_;
  std::unordered_map<int, Entry> connections_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int64_t> origins_ ABSL_GUARDED_BY(mu_);
  absl::Time swept_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace awqd::transport
