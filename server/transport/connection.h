// Connection: what is in flight on one connection: calls, and the bytes that they hold.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "grpc/grpc.h"
#include "grpc/grpc_security.h"
#include "kernels/base/mutex.h"
#include "server/transport/peer_calls.h"

namespace awqd::transport {

class Connections;

// Lives as long as a call of the connection, or as what a call of it has taken. Thread-safe.
class Connection {
 public:
  // A call in flight, from Hold to its end: a member of what lives as long as the call.
  class Ticket {
   public:
    Ticket() = default;
    ~Ticket() {
      if (connection_ == nullptr) return;
      connection_->calls_.fetch_sub(1, std::memory_order_relaxed);
      connection_->share_.Release(place_);
    }
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    // Once at most. Returns how many calls of it are in flight, this one included.
    int64_t Hold(std::shared_ptr<Connection> connection) {
      connection_ = std::move(connection);
      return connection_->calls_.fetch_add(1, std::memory_order_relaxed) + 1;
    }
    // Once at most: what the call has of the connection's share.
    void Keep(PeerCalls::Place place) { place_ = place; }
    // Null before Hold.
    const std::shared_ptr<Connection>& connection() const { return connection_; }

   private:
    std::shared_ptr<Connection> connection_;
    PeerCalls::Place place_ = PeerCalls::Place::kNone;
  };

  // Of no call.
  Connection() = default;
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Counts a call that was refused. Returns how many were, this one included.
  int64_t Refused() { return refused_.fetch_add(1, std::memory_order_relaxed) + 1; }

  // Its part of the calls of its peer.
  PeerCalls::Share* share() { return &share_; }

  int64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  // Of ByteBudget.
  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  friend class ByteBudget;
  friend class ByteLease;
  friend class Connections;
  struct Release {
    void operator()(grpc_auth_context* id) const { grpc_auth_context_release(id); }
  };
  using Id = std::unique_ptr<grpc_auth_context, Release>;

  Connection(std::shared_ptr<Connections> all, Id id) : all_(std::move(all)), id_(std::move(id)) {}

  const std::shared_ptr<Connections> all_;
  const Id id_;  // no other connection has it while this lives
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> refused_{0};
  PeerCalls::Share share_;
};

// Those that have calls in flight. Thread-safe.
class Connections : public std::enable_shared_from_this<Connections> {
 public:
  static std::shared_ptr<Connections> Make() {
    return std::shared_ptr<Connections>(new Connections);
  }

  // The connection of `call`. gRPC makes one authentication context for each connection, with every
  // kind of credentials, so its address says which connection it is. "peer" does not: all clients
  // of a Unix domain socket have the same.
  std::shared_ptr<Connection> Of(grpc_call* call);
  // That exist.
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
