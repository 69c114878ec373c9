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
    int64_t handed_over = 0;
    int64_t too_many = 0;            // closed at max_connections
    int64_t too_many_of_origin = 0;  // closed at max_connections_per_peer
    int64_t no_descriptor = 0;       // closed for want of one
    int64_t silent = 0;              // closed at handshake_timeout
    int64_t pauses = 0;              // how often accepting was paused
    int64_t crowded = 0;             // reset: too many calls of their peer waited in them
    int64_t penalized = 0;           // closed: connections of their peer were reset just before
  };
  // Takes `fd`, a connection of the listening socket `listener`. Called on the acceptor's thread.
  using HandOver = std::function<void(int listener, int fd)>;

  // Connections take three quarters of the descriptors that the process may open, at most.
  explicit Acceptor(const Limits& limits);
  ~Acceptor() { Stop(); }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Before Start: `socket` is non-blocking and listens.
  void AddListener(UniqueFd socket, HandOver hand_over);
  // RESOURCE_EXHAUSTED when the system has no descriptor or no thread for it. Called once.
  absl::Status Start();
  // Closes the listening sockets and what was not handed over. From now on nothing is handed over.
  void Stop();
  // Ends the connections that were handed over and are still open, as if the clients had closed
  // them.
  void EndAll() { open_.EndAll(); }
  // Resets the connection of one peer, "ipv4:10.0.0.7:51034". False when there is none: clients of
  // a socket file have no such name.
  bool ResetPeer(const std::string& peer) { return open_.ResetPeer(peer); }
  // Counts, on the acceptor's thread, the unread calls of this peer, "ipv4:10.0.0.7" as
  // obs::PeerHost spells it. gRPC takes all that one connection has to say before it reads the
  // next. When more calls wait than the peer may have, the connections that hold them are reset,
  // and no new one of the peer is accepted for a second, or for longer when that happens again and
  // again.
  void CheckForCrowd(const std::string& peer);
  // How long nothing has been on the way between that peer and the server; infinite when there is
  // none, as with ResetPeer.
  absl::Duration IdleTime(const std::string& peer) { return open_.IdleTime(peer); }

  // How many connections are open. Checks each.
  int64_t open() { return open_.Count(); }
  Counts counts() const;

 private:
  using Clock = std::chrono::steady_clock;

  // epoll reports events of these.
  struct EventSource {
    virtual ~EventSource() = default;
    virtual void Ready(Acceptor* acceptor, uint32_t events) = 0;
  };
  struct Listener final : EventSource {
    void Ready(Acceptor* acceptor, uint32_t /*events*/) override { acceptor->AcceptFrom(*this); }
    UniqueFd fd;
    HandOver hand_over;
  };
  struct Wake final : EventSource {
    void Ready(Acceptor* acceptor, uint32_t /*events*/) override { acceptor->ResetCrowds(); }
    UniqueFd fd;
  };
  // A connection whose first frame is not complete.
  struct Pending final : EventSource {
    void Ready(Acceptor* acceptor, uint32_t events) override { acceptor->ReadStart(*this, events); }
    UniqueFd fd;
    Listener* listener = nullptr;
    Clock::time_point until;
    std::list<Pending>::iterator self;
  };
  struct Penalty {
    Clock::time_point until;
    std::chrono::seconds length;
  };

  void Run();
  // Milliseconds until a pending connection or a pause ends; -1 when there is none.
  int PollTimeout() const;
  void AcceptFrom(Listener& listener);
  // False when accepting cannot go on for now.
  bool HandleAcceptError(Listener& listener, int error);
  void Admit(Listener& listener, UniqueFd fd);
  void ReadStart(Pending& pending, uint32_t events);
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
  UniqueFd epoll_, stop_;
  // A descriptor that is closed to accept, and close, a connection when there is no other.
  UniqueFd spare_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  Wake wake_;
  Mutex mu_;
  std::set<std::string> crowded_peers_ ABSL_GUARDED_BY(mu_);  // to be checked by the thread
  std::map<std::string, Penalty> penalties_;                  // by origin
  std::list<Pending> pending_;  // in the order they came, so that the first is due first
  bool paused_ = false;
  Clock::time_point paused_until_;
  std::atomic<int64_t> handed_over_{0}, too_many_{0}, too_many_of_origin_{0}, no_descriptor_{0},
      silent_{0}, pauses_{0}, reset_{0}, penalized_{0};
  std::thread thread_;
};

}  // namespace awqd::transport
