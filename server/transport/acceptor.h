// Acceptor: accepts the connections of a server's listening sockets, and hands them to gRPC when
// the client's first frame is there.
//
// gRPC 1.51 accepts by itself as well. But it never accepts again after one accept that fails for
// want of a descriptor, it takes as many connections as come, and it holds silent ones. The
// defences here, with their attackers; acceptor_test shows each, and so do the entries of
// tests/attack:
//   - Descriptors run out, by connections or otherwise: connections are closed until there are some
//     again (`descriptors`).
//   - A crowd of connections: they are limited, in all and for each origin (`crowd`).
//   - Silent peers: gRPC gets a connection when the client's first frame is there, or bytes that
//     are not HTTP/2. So a silent one never reaches it or delays its shutdown (`silence`).
//   - Many calls on many connections at once: connections in which too many calls wait are reset
//     (`crowd`).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "kernels/base/unique_fd.h"
#include "server/transport/open_connections.h"

namespace awqd::transport {

// One thread, from Start to Stop.
class Acceptor {
 public:
  struct Limits {
    int64_t max_connections = 4096;
    int64_t max_connections_per_peer = 1024;
    // How long a connection may take to send its first frame.
    absl::Duration handshake_timeout = absl::Seconds(10);
    // PeerCallLimits::few and per_peer.
    int64_t few_calls = 8;
    int64_t calls_per_peer = 4096;
  };
  // Connections since the start.
  struct Counts {
    std::atomic<int64_t> handed_over{0};
    std::atomic<int64_t> too_many{0};            // closed at max_connections
    std::atomic<int64_t> too_many_of_origin{0};  // closed at max_connections_per_peer
    std::atomic<int64_t> no_descriptor{0};       // closed for want of one
    std::atomic<int64_t> silent{0};              // closed at handshake_timeout
    std::atomic<int64_t> pauses{0};              // how often accepting was paused
    std::atomic<int64_t> crowded{0};    // reset: too many calls of their peer waited in them
    std::atomic<int64_t> penalized{0};  // closed: connections of their peer were reset just before
    std::atomic<int64_t> plaintext{0};  // closed: plaintext on a port that speaks TLS
    std::atomic<int64_t> tls{0};        // handed over, to be closed: TLS on a port that speaks none
  };
  // Takes `fd`, a connection of the listening socket `listener`. Called on the acceptor's thread.
  using HandOver = std::function<void(int listener, int fd)>;

  // Connections take three quarters of the descriptors that the process may open, at most.
  explicit Acceptor(const Limits& limits);
  ~Acceptor() { Stop(); }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Before Start: `socket` is non-blocking and listens. `tls`: its connections speak TLS.
  void AddListener(UniqueFd socket, bool tls, HandOver hand_over);
  // RESOURCE_EXHAUSTED when the system has no descriptor or no thread for it. Called once.
  absl::Status Start();
  // Closes the listening sockets and what was not handed over. From now on nothing is handed over.
  void Stop();
  // Counts, on the acceptor's thread, the unread calls of this peer, "ipv4:10.0.0.7" as
  // obs::PeerHost spells it. gRPC takes all that one connection has to say before it reads the
  // next. When more calls wait than the peer may have, the connections that hold them are reset,
  // and no new one of the peer is accepted for a second, or for longer when that happens again and
  // again.
  void CheckForCrowd(const std::string& peer);
  // The connections that are open: those that were handed over and those that wait for that.
  OpenConnections* open() { return &open_; }
  const Counts& counts() const { return counts_; }

 private:
  using Clock = std::chrono::steady_clock;

  // epoll reports the events of `fd`, and the thread calls `ready` with them.
  struct Source {
    UniqueFd fd;
    std::function<void(uint32_t events)> ready;
  };
  struct Listener : Source {
    bool tls = false;
    HandOver hand_over;
  };
  // A connection whose first frame is not complete.
  struct Pending : Source {
    Clock::time_point until;
  };
  struct Penalty {
    Clock::time_point until;
    std::chrono::seconds length;
  };

  void Run();
  // Milliseconds until a pending connection or a pause ends; -1 when there is none.
  int PollTimeout() const;
  // False: the system has no room for it.
  bool Watch(Source* source, uint32_t events);
  void AcceptFrom(const Listener& listener);
  // False when accepting cannot go on for now.
  bool HandleAcceptError(const Listener& listener, int error);
  void Admit(const Listener& listener, UniqueFd fd);
  void ReadStart(const Listener& listener, std::list<Pending>::iterator pending, uint32_t events);
  // Whether gRPC is to have the connection, whose first bytes are there. Logs and counts one that
  // does not speak as the listener does.
  bool CheckProtocol(const Listener& listener, int fd);
  void CloseSilent();
  void ResetCrowds();
  void Penalize(const std::string& origin);
  bool HasPenalty(const std::string& origin);
  // Stops watching the listening sockets for a moment, and watches them again.
  void Pause();
  void Resume();
  void WatchListeners(uint32_t events);

  const Limits limits_;
  OpenConnections open_;
  UniqueFd epoll_;
  // A descriptor that is closed to accept, and close, a connection when there is no other.
  UniqueFd spare_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  Source stop_, wake_;
  Mutex mu_;
  std::set<std::string> crowded_peers_ ABSL_GUARDED_BY(mu_);  // to be checked by the thread
  std::map<std::string, Penalty> penalties_;                  // by origin
  std::list<Pending> pending_;  // in the order they came, so that the first is due first
  std::optional<Clock::time_point> paused_until_;
  bool stopped_ = false;  // the thread's own
  Counts counts_;
  std::thread thread_;
};

}  // namespace awqd::transport
