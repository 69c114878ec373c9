// WriteTimeout: ends calls whose clients do not read their answers.
//
// Attacker: a client that never opens its flow-control window. gRPC holds an answer until the
// window lets it go, for as long as the client likes, and memory and bytes in flight are held as
// long. Shown by write_timeout_test, admission_limits_test and `unread_answers` of tests/attack.
#pragma once

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

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
    Write* before_ = nullptr;
    Write* after_ = nullptr;
    bool watched_ = false;
  };

  // An infinite timeout: nothing is ever late.
  explicit WriteTimeout(absl::Duration timeout);
  ~WriteTimeout();
  WriteTimeout(const WriteTimeout&) = delete;
  WriteTimeout& operator=(const WriteTimeout&) = delete;

  // `write` is late when End does not come within the timeout.
  void Begin(Write* write);
  // `write` is never late after this returned.
  void End(Write* write);

 private:
  void Run();
  void Unlink(Write* write) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::chrono::nanoseconds timeout_;
  const std::chrono::nanoseconds period_;
  Mutex mu_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  // In the order they began, which is the order in which they are late.
  Write* first_ ABSL_GUARDED_BY(mu_) = nullptr;
  Write* last_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::thread thread_;
};

}  // namespace awqd::transport
