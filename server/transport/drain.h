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
#include <memory>
#include <utility>
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
  // The in-flight guard of a call: the call counts until its guard is destroyed.
  struct End {
    void operator()(Drain* drain) const { drain->in_flight_.fetch_sub(1); }
  };
  using InFlight = std::unique_ptr<Drain, End>;
  InFlight CountCall() {
    in_flight_.fetch_add(1);
    return InFlight(this);
  }

  // Calls `rejecting` once, when RejectNewCalls is called, on the thread that calls it. Streams end
  // then. The call may come while the listener is destroyed, so `rejecting` owns what it uses or
  // holds weak references to it.
  class Listener {
   public:
    Listener(Drain* drain, std::function<void()> rejecting) : drain_(drain) {
      {
        MutexLock lock(&drain_->mu_);
        id_ = drain_->next_listener_++;
        if (drain_->state_.load() != State::kRejecting) {
          drain_->listeners_.emplace(id_, std::move(rejecting));
          return;
        }
      }
      rejecting();
    }
    ~Listener() {
      MutexLock lock(&drain_->mu_);
      drain_->listeners_.erase(id_);
    }
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;

   private:
    Drain* const drain_;
    int64_t id_ = 0;
  };

  // Whether new calls are let in.
  bool open() const { return state_.load(std::memory_order_relaxed) == State::kOpen; }
  // From now on new calls wait.
  void HoldNewCalls() { state_.store(State::kHolding); }
  // Answers the calls that wait and tells the listeners. From now on every new call is answered at
  // once.
  void RejectNewCalls() {
    std::vector<std::function<void()>> waiting;
    {
      MutexLock lock(&mu_);
      state_.store(State::kRejecting);
      waiting.swap(waiting_);
      for (auto& [id, listener] : listeners_) waiting.push_back(std::move(listener));
      listeners_.clear();
    }
    for (const std::function<void()>& run : waiting) run();
  }

  // For a call that came while new calls are not let in: runs `answer`, which sends
  // UnavailableStatus, now or in RejectNewCalls.
  void Reject(std::function<void()> answer) {
    rejected_.fetch_add(1);
    {
      MutexLock lock(&mu_);
      if (state_.load() == State::kHolding) {
        waiting_.push_back(std::move(answer));
        return;
      }
    }
    answer();
  }
  static grpc::Status UnavailableStatus() {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is draining; try another one");
  }

  // Guards that exist.
  int64_t in_flight() const { return in_flight_.load(); }
  // Calls given to Reject so far. Each is in flight until it is answered.
  int64_t rejected() const { return rejected_.load(); }

 private:
  enum class State { kOpen, kHolding, kRejecting };

  std::atomic<State> state_{State::kOpen};
  std::atomic<int64_t> in_flight_{0};
  std::atomic<int64_t> rejected_{0};
  Mutex mu_;
  std::vector<std::function<void()>> waiting_ ABSL_GUARDED_BY(mu_);
  int64_t next_listener_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<int64_t, std::function<void()>> listeners_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::transport
