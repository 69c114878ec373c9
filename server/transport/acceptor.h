// Acceptor: accepts the connections of a server's listening sockets, and hands those to gRPC that
// may stay and have begun to speak.
//
// gRPC 1.51 accepts by itself as well, but one accept that fails for want of a descriptor is its
// last, it takes as many connections as come, and it holds those that say nothing. Here:
//   - The end of descriptors is survived: connections are closed until there are some again.
//   - Connections are bounded, in all and for each origin; one more is closed at once.
//   - gRPC is given a connection when the client's first frame is there, or something that is no
//     HTTP/2: so none that is silent reaches it, and none holds the end of the server back.
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
    // How long a connection may take to say its first word.
    absl::Duration handshake_timeout = absl::Seconds(10);
    // As PeerCallLimits says.
    int64_t few_calls = 8;
    int64_t calls_per_peer = 4096;
  };
  // Connections so far.
  struct Counts {
    int64_t handed_over = 0;
    int64_t too_many = 0;            // closed at max_connections
    int64_t too_many_of_origin = 0;  // closed at max_connections_per_peer
    int64_t no_descriptor = 0;       // closed for want of one
    int64_t silent = 0;              // closed at handshake_timeout
    int64_t pauses = 0;              // how often accepting was given up for a moment
    int64_t crowded = 0;             // reset, because too many calls of their peer waited in them
    int64_t penalized = 0;           // closed, because that happened to their peer just before
  };
  // Takes `fd`, a connection of the listening socket `listener`. Called on the thread.
  using HandOver = std::function<void(int listener, int fd)>;

  // Connections take three quarters of the descriptors that the process may open, at most.
  explicit Acceptor(const Limits& limits);
  ~Acceptor() { Stop(); }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  // Before Start: accepts of `socket`, which is non-blocking and listens.
  void Add(UniqueFd socket, HandOver hand_over);
  // RESOURCE_EXHAUSTED when the system has no descriptor or no thread for it. Called once.
  absl::Status Start();
  // Closes the listening sockets and what was not handed over. From now on nothing is handed over.
  void Stop();
  // Ends what was handed over and is still open, as if the client had closed it.
  void Cut() { open_.Cut(); }
  // The same of one peer, "ipv4:10.0.0.7:51034". False when there is none: clients of a socket file
  // have no such name.
  bool Cut(const std::string& peer) { return open_.Cut(peer); }
  // Looks on the acceptor's thread for calls of this peer, "ipv4:10.0.0.7" as MachineOf spells it,
  // that wait unread: gRPC takes all that one connection has to say before it looks at the next.
  // When they are more than the peer may have, the connections that hold them are reset, and no new
  // one of the peer is accepted for a second; for longer when that happens again and again.
  void CheckForCrowd(const std::string& peer);
  // How long nothing has been on the way between that peer and the server; infinite when there is
  // none, as above.
  absl::Duration StillFor(const std::string& peer) { return open_.StillFor(peer); }

  // That are open, of those that were let in. Looks at each.
  int64_t open() { return open_.Count(); }
  Counts counts() const;

 private:
  using Clock = std::chrono::steady_clock;

  // What epoll reports.
  struct Source {
    virtual ~Source() = default;
    virtual void Ready(Acceptor* acceptor, uint32_t events) = 0;
  };
  struct Listener final : Source {
    void Ready(Acceptor* acceptor, uint32_t /*events*/) override { acceptor->AcceptOf(*this); }
    UniqueFd fd;
    HandOver hand_over;
  };
  struct Wake final : Source {
    void Ready(Acceptor* acceptor, uint32_t /*events*/) override { acceptor->ResetCrowds(); }
    UniqueFd fd;
  };
  // A connection that has not said enough yet.
  struct Newcomer final : Source {
    void Ready(Acceptor* acceptor, uint32_t events) override { acceptor->Look(*this, events); }
    UniqueFd fd;
    Listener* listener = nullptr;
    Clock::time_point until;
    std::list<Newcomer>::iterator self;
  };
  struct Penalty {
    Clock::time_point until;
    std::chrono::seconds length;
  };

  void Run();
  // Milliseconds until something is due; -1 when nothing is.
  int Patience() const;
  void AcceptOf(Listener& listener);
  // False when accepting makes no sense for now.
  bool HandleAcceptError(Listener& listener, int error);
  void Admit(Listener& listener, UniqueFd fd);
  void Look(Newcomer& newcomer, uint32_t events);
  void CloseSilent();
  void ResetCrowds();
  void Penalize(const std::string& origin);
  bool HasPenalty(const std::string& origin);
  // Stops looking at the listening sockets for a moment, or looks at them again.
  void Pause();
  void Resume();
  void WatchListeners(uint32_t events);

  const Limits limits_;
  OpenConnections open_;
  UniqueFd epoll_, stop_;
  // Given up to close a connection when there is no other descriptor.
  UniqueFd reserve_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  Wake wake_;
  Mutex mu_;
  std::set<std::string> crowded_peers_ ABSL_GUARDED_BY(mu_);  // that the thread has yet to look at
  std::map<std::string, Penalty> penalties_;                  // of origins
  std::list<Newcomer> newcomers_;  // in the order they came, so that the first is due first
  bool paused_ = false;
  Clock::time_point paused_until_;
  std::atomic<int64_t> handed_over_{0}, too_many_{0}, too_many_of_origin_{0}, no_descriptor_{0},
      silent_{0}, pauses_{0}, reset_{0}, penalized_{0};
  std::thread thread_;
};

}  // namespace awqd::transport
