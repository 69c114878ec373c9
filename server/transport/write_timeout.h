// WriteTimeout: ends calls whose clients do not read their answers.
//
// Attacker: a client that never opens its flow-control window. gRPC holds an answer until the
// window lets it go, for as long as the client likes, and memory and bytes in flight are held as
// long. Shown by write_timeout_test, admission_limits_test and `unread_answers` of tests/attack.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <list>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "kernels/base/pause.h"

namespace awqd::transport {

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

}  // namespace awqd::transport
