// Task: one unit of queued work. The batching room knows its size, urgency and fate, never what it
// computes.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace awqd {

class Task {
 public:
  virtual ~Task() = default;

  // Tokens (rows of activations); what queues and batches are bounded by. 0 is legal.
  virtual int64_t tokens() const = 0;
  // Bytes of payload held while queued.
  virtual int64_t bytes() const = 0;

  // Runs the task's completion with an error instead of executing it. Called at most once, and
  // never after the task was handed to the executor.
  virtual void Fail(const absl::Status& status) = 0;

  // Larger is more urgent; 0 is normal.
  int priority = 0;
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time enqueued = absl::InfinitePast();  // set by the scheduler

  // Callable from any thread, also while queued; a cancelled task never reaches the executor once
  // seen.
  void Cancel() { cancelled_.store(true, std::memory_order_release); }
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> cancelled_{false};
};

}  // namespace awqd
