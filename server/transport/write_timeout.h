// WriteTimeout: ends calls whose clients do not take what they asked for.
//
// gRPC holds an answer until the client's flow control lets it go, for as long as the client likes.
// Memory and bytes in flight are held as long.
#pragma once

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace awqd::transport {

// Thread-safe. Its thread looks at what is being sent a few times in each timeout.
class WriteTimeout {
 public:
  // A message or a status on its way out; a member of its call. One at a time.
  class Send {
   public:
    // `late` is called once at most, between Begin and End, under a lock: it must not call End.
    explicit Send(std::function<void()> late) : late_(std::move(late)) {}
    Send(const Send&) = delete;
    Send& operator=(const Send&) = delete;

   private:
    friend class WriteTimeout;
    const std::function<void()> late_;
    std::chrono::steady_clock::time_point until_;
    Send* before_ = nullptr;
    Send* after_ = nullptr;
    bool watched_ = false;
  };

  // An infinite timeout: nothing is ever late.
  explicit WriteTimeout(absl::Duration timeout);
  ~WriteTimeout();
  WriteTimeout(const WriteTimeout&) = delete;
  WriteTimeout& operator=(const WriteTimeout&) = delete;

  // `send` is late when End has not come in time.
  void Begin(Send* send);
  // From its return on `send` is not late any more.
  void End(Send* send);

 private:
  void Run();
  void Unlink(Send* send) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::chrono::nanoseconds timeout_;
  const std::chrono::nanoseconds period_;
  Mutex mu_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  // In the order they began, which is the order in which they are late.
  Send* first_ ABSL_GUARDED_BY(mu_) = nullptr;
  Send* last_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::thread thread_;
};

}  // namespace awqd::transport
