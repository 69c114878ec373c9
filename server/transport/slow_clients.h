// Slow clients: WriteTimeout ends calls whose answers are not read; TransitTimes says how long
// requests take to come and answers to leave.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "kernels/base/pause.h"

namespace awqd::transport {

// Attacker: a client that never opens its flow-control window. gRPC holds an answer until the
// window lets it go, for as long as the client likes, and memory and bytes in flight are held as
// long. Shown by write_timeout_test, admission_limits_test and `unread_answers` of tests/attack.
//
// Thread-safe. Its thread polls a few times in each timeout.
class WriteTimeout {
 public:
  // A message or a status that is being written. A member of its call, one at a time.
  class Write {
   public:
    // `late` is called once at most, between Begin and End, under a lock: it must not call End.
    explicit Write(std::function<void()> late) : late_(std::move(late)) {}
    Write(const Write&) = delete;
    Write& operator=(const Write&) = delete;

   private:
    friend class WriteTimeout;
    const std::function<void()> late_;
    std::chrono::steady_clock::time_point until_;
    // Its node, which is in the timeout's list while it is watched, and otherwise in its own.
    std::list<Write*> own_{this};
    const std::list<Write*>::iterator node_ = own_.begin();
  };

  // An infinite timeout: nothing is ever late.
  explicit WriteTimeout(absl::Duration timeout) : timeout_(absl::ToChronoNanoseconds(timeout)) {
    if (timeout == absl::InfiniteDuration()) return;
    // A write is ended an eighth of the timeout too late at most.
    const absl::Duration period = std::clamp(timeout / 8, absl::Milliseconds(1), absl::Seconds(10));
    thread_ = std::thread([this, period] {
      while (pause_.WaitFor(period)) EndLateWrites();
    });
  }
  ~WriteTimeout() {
    pause_.End();
    if (thread_.joinable()) thread_.join();
  }
  WriteTimeout(const WriteTimeout&) = delete;
  WriteTimeout& operator=(const WriteTimeout&) = delete;

  // `write` is late when End does not come within the timeout.
  void Begin(Write* write) {
    if (!thread_.joinable()) return;
    const auto until = std::chrono::steady_clock::now() + timeout_;
    MutexLock lock(&mu_);
    write->until_ = until;
    writes_.splice(writes_.end(), write->own_);
  }
  // `write` is never late after this returned.
  void End(Write* write) {
    if (!thread_.joinable()) return;
    MutexLock lock(&mu_);
    if (write->own_.empty()) write->own_.splice(write->own_.end(), writes_, write->node_);
  }

 private:
  void EndLateWrites() {
    MutexLock lock(&mu_);
    const auto now = std::chrono::steady_clock::now();
    while (!writes_.empty() && writes_.front()->until_ <= now) {
      Write* const late = writes_.front();
      late->own_.splice(late->own_.end(), writes_, late->node_);
      late->late_();
    }
  }

  const std::chrono::nanoseconds timeout_;
  Mutex mu_;
  // In the order they began, which is the order in which they are late.
  std::list<Write*> writes_ ABSL_GUARDED_BY(mu_);
  Pause pause_;
  std::thread thread_;
};

// A part of a call's way. Times fall at once and rise slowly: they rise where all calls take long.
// Thread-safe, without a lock: a call that is lost in a race changes little.
class TransitStage {
 public:
  using Clock = std::chrono::steady_clock;

  void Enter() { calls_.fetch_add(1, kOrder); }
  // A call that entered at `since` leaves. Not `whole`: it would have taken longer.
  void Leave(Clock::time_point since, Clock::time_point now, bool whole) {
    const auto calls = static_cast<float>(calls_.fetch_sub(1, kOrder));
    const auto took = static_cast<float>(std::max<int64_t>(1, Nanoseconds(now - since)));
    float usual = usual_ns_.load(kOrder);
    if (!Known(now)) {
      usual = std::min(took, kBeginNs);
    } else if (took >= usual) {
      usual += (std::min(took, usual * kMostChange) - usual) * kWeight;
    } else if (whole) {
      usual = took;
    } else {
      return;
    }
    const float usual_calls = usual_calls_.load(kOrder);
    usual_ns_.store(usual, kOrder);
    usual_calls_.store(usual_calls + (calls - usual_calls) * kCallsWeight, kOrder);
    left_at_.store(Nanoseconds(now.time_since_epoch()), kOrder);
  }
  // How long a call takes that enters now: as long as the latest ones took, and longer in
  // proportion when more calls are in the stage than were then, because a backlog shows in their
  // number first.
  // Zero when none has left within the last second: then the server tries.
  absl::Duration Expect(Clock::time_point now) const {
    if (!Known(now)) return absl::ZeroDuration();
    const float crowd =
        static_cast<float>(calls_.load(kOrder)) / std::max(1.0F, usual_calls_.load(kOrder));
    return absl::Nanoseconds(usual_ns_.load(kOrder) * std::clamp(crowd, 1.0F, kMostCrowd));
  }

 private:
  static constexpr auto kOrder = std::memory_order_relaxed;
  // The average rises to 1.44 times at most with each call that took longer.
  static constexpr float kWeight = 1.0F / 16, kMostChange = 8;
  // It begins with no more, whatever the first call took.
  static constexpr float kBeginNs = 1e6;
  static constexpr float kCallsWeight = 1.0F / 8;
  // How much more than before a crowd of calls counts, which may wait for their clients.
  static constexpr float kMostCrowd = 64;
  static constexpr int64_t kKnownNs = 1'000'000'000;

  static int64_t Nanoseconds(Clock::duration time) {
    return std::chrono::nanoseconds(time).count();
  }
  // Whether a call has left within the last second.
  bool Known(Clock::time_point now) const {
    const int64_t left_at = left_at_.load(kOrder);
    return left_at != 0 && Nanoseconds(now.time_since_epoch()) - left_at <= kKnownNs;
  }

  std::atomic<int64_t> calls_{0};  // in the stage
  // Averages over calls that left: their times in nanoseconds, and how many were in the stage.
  std::atomic<float> usual_ns_{0}, usual_calls_{1};
  std::atomic<int64_t> left_at_{0};  // the last one, in nanoseconds of the clock; 0: none
};

// Admission by time counts it into what a call is expected to take. It does not see what waits in a
// socket before gRPC reads it.
//
// Attacker: a client that sends or reads slowly on purpose. Its calls take long, and others would
// be refused for that, so TransitStage follows the fast ones. Shown by transit_times_test.
struct TransitTimes {
  TransitStage receiving;  // from a call's headers until its message is here
  TransitStage sending;    // from an answer until gRPC has sent it

  absl::Duration Expect(TransitStage::Clock::time_point now) const {
    return receiving.Expect(now) + sending.Expect(now);
  }
};

}  // namespace awqd::transport
