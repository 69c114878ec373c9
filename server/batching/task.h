// Task: one unit of queued work. The batching room knows its size, urgency and fate, never what it
// computes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace awqd {

// Shared between a task and whoever may withdraw it, so that either may go first.
using CancelFlag = std::shared_ptr<std::atomic<bool>>;

class Task {
 public:
  virtual ~Task() = default;

  // Tokens (rows of activations); what batches are bounded by. 0 is legal.
  virtual int64_t tokens() const = 0;
  // Bytes of payload held while queued.
  virtual int64_t bytes() const = 0;

  // Completes the task with an error instead of executing it. Called at most once, and never after
  // the task was handed to the executor.
  virtual void Fail(const absl::Status& status) = 0;

  // Larger is more urgent; 0 is normal.
  int priority = 0;
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time enqueued = absl::InfinitePast();  // set by the scheduler

  // Set from any thread; a task seen cancelled never reaches the executor.
  const CancelFlag& cancel_flag() const { return cancel_; }
  bool cancelled() const { return cancel_->load(std::memory_order_acquire); }

 private:
  CancelFlag cancel_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace awqd
