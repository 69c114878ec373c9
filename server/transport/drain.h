// Drain: which calls are in flight, and how calls are answered that arrive while the server
// stops.
//
// gRPC answers a call that reaches a stopping server by itself, with CANCELLED, which clients do
// not retry. So the gate closes before gRPC stops: calls wait behind it, their clients send nothing
// more, gRPC announces the end on every connection, and then those that wait are answered
// UNAVAILABLE.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "grpcpp/support/status.h"
#include "kernels/base/mutex.h"

namespace awqd::transport {

// Time for a message to a distant client and back; the server waits this long for clients while it
// stops.
inline constexpr absl::Duration kRoundTrip = absl::Milliseconds(100);

// Thread-safe. Outlives the gRPC server.
class Drain {
 public:
  // A call in flight, from Hold to its end: a member of what lives as long as the call.
  class Ticket {
   public:
    Ticket() = default;
    ~Ticket() {
      if (gate_ != nullptr) gate_->in_flight_.fetch_sub(1);
    }
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    // Once at most.
    void Hold(Drain* gate) {
      gate_ = gate;
      gate_->in_flight_.fetch_add(1);
    }

   private:
    Drain* gate_ = nullptr;
  };

  // Hears of Refuse while it exists, once, on the thread that calls it; for streams, which end
  // then. The call may come while the listener is destroyed, so it owns or weakly refers to what it
  // uses.
  class Listener {
   public:
    Listener(Drain* gate, std::function<void()> refusing);
    ~Listener();
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;

   private:
    Drain* const gate_;
    const int64_t id_;
  };

  // For a call that came while the gate was not open: `answer` sends Draining, now or at Refuse.
  void TurnAway(std::function<void()> answer);

  bool open() const { return state_.load(std::memory_order_relaxed) == State::kOpen; }
  // What refused calls are answered with.
  static grpc::Status Draining();

  // From now on new calls wait.
  void Close();
  // Answers those that wait and tells the listeners; from now on answers every new call at once.
  void Refuse();

  // Tickets that exist.
  int64_t in_flight() const { return in_flight_.load(); }
  // Calls that have come to the gate since it closed. Each has a ticket until it is answered.
  int64_t turned_away() const { return turned_away_.load(); }

 private:
  enum class State { kOpen, kClosed, kRefusing };

  int64_t Listen(std::function<void()> refusing);

  std::atomic<State> state_{State::kOpen};
  std::atomic<int64_t> in_flight_{0};
  std::atomic<int64_t> turned_away_{0};
  Mutex mu_;
  std::vector<std::function<void()>> waiting_ ABSL_GUARDED_BY(mu_);
  int64_t next_listener_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<int64_t, std::function<void()>> listeners_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::transport
