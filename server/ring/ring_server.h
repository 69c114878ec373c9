// RingServer: gives rings to clients of a UNIX socket, and runs the threads that serve them.
//
// A thread starts what is submitted in its rings, runs what that queued, and spins for a while after
// the last submission; then it sleeps in epoll on the sockets and the clients' eventfds. A new
// connection goes to the thread that has fewest.
//
// Attacker: a user of this machine who may open the socket. Connections, rings, their memory and
// their prepared calls are bounded, a message is read as it comes, and nothing that a client does
// to its descriptors blocks the thread. Shown by rings_test, ring_e2e_test and fuzz_ring.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "kernels/base/unique_fd.h"
#include "server/obs/snapshot.h"
#include "server/ring/ring.h"
#include "server/transport/admission.h"
#include "server/transport/call_loop.h"
#include "server/transport/limits.h"
#include "server/transport/listening.h"

namespace awqd::ring {

// The flags in server/config/flags.cc explain each.
struct Options {
  std::string path;  // of the socket; empty: no rings
  absl::Duration spin = absl::Microseconds(50);
  int threads = 1;  // on a GPU at least so many
  int64_t max_rings = 64;
  int64_t max_rings_per_client = 16;
  int64_t max_bytes = int64_t{64} << 20;  // of the payload of a ring
};

class RingServer {
 public:
  // Turns a request into a prepared call. `charge`: of the bytes that it keeps.
  using Prepare = std::function<absl::StatusOr<PreparedPtr>(
      uint64_t method, absl::string_view request, transport::Charge charge)>;

  // Maps memory that a ring's client shares: an awqd.v1.ShareMemoryRequest, and the memory's
  // descriptor, if one came. It is a region of the client's until the result is destroyed.
  struct SharedRegion {
    std::string name;
    std::shared_ptr<void> held;
  };
  using Share = std::function<absl::StatusOr<SharedRegion>(
      const security::IdentityPtr& identity, absl::string_view request, UniqueFd descriptor)>;

  // Before `admission` and `loop`, which outlive it, start.
  RingServer(const Options& options, transport::Admission* admission, transport::CallLoop* loop,
             Prepare prepare, Share share);
  ~RingServer();

  // Listens. `mode`: permissions of the socket file. Connections that do not open a ring within
  // `handshake_timeout` are closed. INVALID_ARGUMENT or UNAVAILABLE as ListenOnPath.
  absl::Status Start(mode_t mode, absl::Duration handshake_timeout);
  // Closes every ring, and returns when the calls of all have ended.
  void Stop();

  obs::RingStats statistics() const;  // thread-safe

 private:
  struct Connection;
  // The rings that live, by client.
  struct Places {
    Mutex mu;
    CondVar changed;
    std::map<std::string, int64_t> of_client ABSL_GUARDED_BY(mu);
    int64_t all ABSL_GUARDED_BY(mu) = 0;
  };

  class Loop;

  // A place of the client's, and one of those of all if `of_all`, until the result is destroyed.
  absl::StatusOr<std::shared_ptr<void>> TakePlace(const std::string& client, bool of_all);

  const Options options_;
  transport::Admission* const admission_;
  transport::CallLoop* const loop_;
  const Prepare prepare_;
  const Share share_;
  transport::Admission::Entry* const empty_;
  transport::Admission::Entry* const chains_;
  const std::shared_ptr<Places> places_ = std::make_shared<Places>();
  absl::Duration handshake_timeout_;
  transport::ListenSockets listening_;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> refused_{0}, broken_{0}, sleeps_{0};
  std::vector<std::unique_ptr<Loop>> loops_;  // the first one listens
};

}  // namespace awqd::ring
