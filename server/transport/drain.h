// Drain: which calls are in flight, and how calls are answered that arrive while the server stops.
//
// gRPC answers a call that reaches a stopping server with CANCELLED, which clients do not retry. So
// the server drains before gRPC stops. New calls wait, and their clients send nothing more. gRPC
// announces the end on every connection. Then the calls that wait are answered UNAVAILABLE.
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

// Time for a message to a distant client and back. The server waits this long for clients while it
// stops.
inline constexpr absl::Duration kRoundTrip = absl::Milliseconds(100);

// Thread-safe. Outlives the gRPC server.
class Drain {
 public:
  // The in-flight guard of a call: the call counts from Begin until its guard is destroyed.
  class InFlight {
   public:
    InFlight() = default;
    ~InFlight() {
      if (drain_ != nullptr) drain_->in_flight_.fetch_sub(1);
    }
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;
    // Once at most.
    void Begin(Drain* drain) {
      drain_ = drain;
      drain_->in_flight_.fetch_add(1);
    }

   private:
    Drain* drain_ = nullptr;
  };

  // Calls `rejecting` once, when RejectNewCalls is called, on the thread that calls it. Streams end
  // then. The call may come while the listener is destroyed, so `rejecting` owns what it uses or
  // holds weak references to it.
  class Listener {
   public:
    Listener(Drain* drain, std::function<void()> rejecting);
    ~Listener();
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;

   private:
    Drain* const drain_;
    const int64_t id_;
  };

  // Whether new calls are let in.
  bool open() const { return state_.load(std::memory_order_relaxed) == State::kOpen; }
  // From now on new calls wait.
  void HoldNewCalls();
  // Answers the calls that wait and tells the listeners. From now on every new call is answered at
  // once.
  void RejectNewCalls();

  // For a call that came while new calls are not let in: runs `answer`, which sends
  // UnavailableStatus, now or in RejectNewCalls.
  void Reject(std::function<void()> answer);
  static grpc::Status UnavailableStatus();

  // Guards that have begun and exist.
  int64_t in_flight() const { return in_flight_.load(); }
  // Calls given to Reject so far. Each is in flight until it is answered.
  int64_t rejected() const { return rejected_.load(); }

 private:
  enum class State { kOpen, kHolding, kRejecting };

  int64_t AddListener(std::function<void()> rejecting);

  std::atomic<State> state_{State::kOpen};
  std::atomic<int64_t> in_flight_{0};
  std::atomic<int64_t> rejected_{0};
  Mutex mu_;
  std::vector<std::function<void()>> waiting_ ABSL_GUARDED_BY(mu_);
  int64_t next_listener_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<int64_t, std::function<void()>> listeners_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::transport
