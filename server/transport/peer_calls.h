// PeerCalls: how many calls all connections of one peer may have in flight together.
//
// A connection is bounded by itself, and so is the number of connections of a peer. Their product
// is not: 1000 connections of 512 calls each take 3.7 GB of gRPC's memory.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "kernels/base/mutex.h"

namespace awqd::transport {

struct PeerCallLimits {
  // Each connection may have so many whatever its neighbours do; these are not counted.
  int64_t few = 8;
  // All connections of one peer may have so many beyond that, and those of all peers.
  int64_t per_peer = std::numeric_limits<int64_t>::max() / 4;
  int64_t total = std::numeric_limits<int64_t>::max() / 2;
  // Called on a thread of the loop when many calls of this peer come at once: more may wait in its
  // sockets. "ipv4:10.0.0.7", as MachineOf spells it. May be null.
  std::function<void(const std::string& peer)> crowded;
};

// Thread-safe.
class PeerCalls {
 public:
  // A call counts as one of these until it is gone.
  enum class Place {
    kNone,
    kTaken,    // it may begin
    kRefused,  // it may not, and is in flight until its client has read that
    kDropped,  // it may not, and too many wait to be told: it ends without words
  };
  class Peer;
  // The part of one connection.
  class Share {
   public:
    void Release(Place place);

   private:
    friend class PeerCalls;
    std::atomic<Peer*> joined_{nullptr};
    std::shared_ptr<Peer> peer_;  // set once, before joined_
    std::atomic<int64_t> calls_{0};
    std::atomic<int64_t> came_{0};
  };

  explicit PeerCalls(const PeerCallLimits& limits) : limits_(limits) {}

  int64_t few() const { return limits_.few; }
  // Each call that comes is counted first. `name`, that of the peer, is asked for once in the life
  // of a share to which more than a few calls come.
  void Count(Share* share, absl::FunctionRef<std::string()> name,
             std::chrono::steady_clock::time_point now);
  // The place of a call, whose connection has more than a few in flight. One that asks to begin may
  // do so as long as its connection then has no more than what is left to the others of its peer,
  // and its peer no more than what is left to other peers.
  Place Take(Share* share, bool asks_to_begin, absl::FunctionRef<std::string()> name);
  // Peers that are remembered.
  int64_t size() const;

 private:
  Peer* Join(Share* share, absl::FunctionRef<std::string()> name);

  const PeerCallLimits limits_;
  const std::shared_ptr<std::atomic<int64_t>> total_ = std::make_shared<std::atomic<int64_t>>(0);
  mutable Mutex mu_;
  std::map<std::string, std::weak_ptr<Peer>> peers_ ABSL_GUARDED_BY(mu_);
  size_t sweep_at_ ABSL_GUARDED_BY(mu_) = 64;
};

}  // namespace awqd::transport
