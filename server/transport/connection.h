// Connection: the calls and bytes in flight on one connection. PeerCalls: the calls in flight on
// all connections of one peer.
//
// Attacker: a peer with many connections and many calls on each. gRPC 1.51 holds nobody to its own
// limit of streams who never acknowledges it, and 1000 connections of 512 calls take 3.7 GB of its
// memory. Shown by peer_calls_test and by `crowd` of tests/attack.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "grpc/grpc.h"
#include "grpc/grpc_security.h"
#include "kernels/base/mutex.h"

namespace awqd::transport {

class Connection;
class Connections;

struct PeerCallLimits {
  // Each connection may have so many calls whatever its neighbours do. These are not counted.
  int64_t few = 8;
  // All connections of one peer may have so many beyond that, and those of all peers together.
  int64_t per_peer = std::numeric_limits<int64_t>::max() / 4;
  int64_t total = std::numeric_limits<int64_t>::max() / 2;
  // Called on a thread of the loop when many calls of this peer come at once: more may wait in its
  // sockets. The peer is spelled as obs::PeerHost spells it: "ipv4:10.0.0.7". May be null.
  std::function<void(const std::string& peer)> crowded;
};

// Thread-safe. Locks nothing but the table of peers.
class PeerCalls {
 public:
  // How a call counts until it is gone.
  enum class Place {
    kNone,
    kAdmitted,  // it may begin
    kRejected,  // it may not begin, and is in flight until its client has read that
    kDropped,   // it may not begin, and too many wait to be told: it ends without an answer
  };
  class Peer;
  explicit PeerCalls(const PeerCallLimits& limits) : limits_(limits) {}

  int64_t few() const { return limits_.few; }
  // Each call that comes is counted first. `name` returns the peer. It is called once in the life
  // of a connection to which more than a few calls come.
  void CountArrival(Connection* connection, absl::FunctionRef<std::string()> name,
                    std::chrono::steady_clock::time_point now);
  // For a call whose connection has more than a few in flight. A call that asks to begin may do so
  // as long as its connection then has no more than what is left to the others of its peer, and its
  // peer no more than what is left to other peers.
  Place Admit(Connection* connection, bool asks_to_begin, absl::FunctionRef<std::string()> name);
  // The end of a call that Admit has seen.
  static void Release(Connection* connection, Place place);
  // How many peers are remembered.
  int64_t size() const;

 private:
  Peer* FindPeer(Connection* connection, absl::FunctionRef<std::string()> name);

  const PeerCallLimits limits_;
  const std::shared_ptr<std::atomic<int64_t>> total_ = std::make_shared<std::atomic<int64_t>>(0);
  mutable Mutex mu_;
  std::map<std::string, std::weak_ptr<Peer>> peers_ ABSL_GUARDED_BY(mu_);
  size_t sweep_at_ ABSL_GUARDED_BY(mu_) = 64;
};

// Lives as long as a call of the connection, or as a lease of its bytes. Thread-safe.
class Connection {
 public:
  // The in-flight guard of a call: the call counts from Begin until its guard is destroyed.
  class InFlight {
   public:
    InFlight() = default;
    ~InFlight() {
      if (connection_ == nullptr) return;
      connection_->calls_.fetch_sub(1, std::memory_order_relaxed);
      PeerCalls::Release(connection_.get(), place_);
    }
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;
    // Once at most. Returns how many calls of the connection are in flight, this one included.
    int64_t Begin(std::shared_ptr<Connection> connection) {
      connection_ = std::move(connection);
      return connection_->calls_.fetch_add(1, std::memory_order_relaxed) + 1;
    }
    // Once at most: how the call counts among those of its peer.
    void SetPlace(PeerCalls::Place place) { place_ = place; }
    // Null before Begin.
    const std::shared_ptr<Connection>& connection() const { return connection_; }

   private:
    std::shared_ptr<Connection> connection_;
    PeerCalls::Place place_ = PeerCalls::Place::kNone;
  };

  // A connection that is in no table, for tests.
  Connection() = default;
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Counts a call that was rejected. Returns how many were, this one included.
  int64_t CountRejected() { return rejected_.fetch_add(1, std::memory_order_relaxed) + 1; }

  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  // Bytes of a ByteBudget.
  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  friend class ByteBudget;
  friend class Connections;
  friend class PeerCalls;
  struct Release {
    void operator()(grpc_auth_context* id) const { grpc_auth_context_release(id); }
  };
  using Id = std::unique_ptr<grpc_auth_context, Release>;

  Connection(std::shared_ptr<Connections> all, Id id) : all_(std::move(all)), id_(std::move(id)) {}

  const std::shared_ptr<Connections> all_;
  const Id id_;  // no other connection has it while this lives
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> rejected_{0};
  // Its part of the calls of its peer. The peer is set once, before joined_.
  std::shared_ptr<PeerCalls::Peer> peer_;
  std::atomic<PeerCalls::Peer*> joined_{nullptr};
  std::atomic<int64_t> calls_of_peer_{0}, came_{0};
};

// The connections that have calls in flight. Thread-safe.
class Connections : public std::enable_shared_from_this<Connections> {
 public:
  static std::shared_ptr<Connections> Make() {
    return std::shared_ptr<Connections>(new Connections);
  }

  // The connection of `call`. gRPC makes one authentication context for each connection, with every
  // kind of credentials, so its address says which connection it is. The peer's name does not: all
  // clients of a Unix domain socket have the same.
  std::shared_ptr<Connection> Find(grpc_call* call);
  int64_t size() const;

 private:
  friend class Connection;
  Connections() = default;
  void Forget(const grpc_auth_context* id);

  mutable Mutex mu_;
  std::unordered_map<const grpc_auth_context*, std::weak_ptr<Connection>> connections_
      ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::transport
