// Task: one unit of queued work. The batching room knows its size, urgency and fate, never what it
// computes.
#pragma once

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace awqd::batching {

// Tasks with equal keys may run as one batch: the same operation, weight and element types. A null
// subject never merges.
struct BatchKey {
  const void* subject = nullptr;
  uint32_t variant = 0;
  const void* kind = nullptr;  // tasks of different kinds never merge

  friend bool operator==(const BatchKey&, const BatchKey&) = default;
};

class Task {
 public:
  virtual ~Task() = default;

  // Tokens (rows of activations); what batches are bounded by. 0 is legal.
  virtual int64_t tokens() const = 0;
  // Bytes of payload held while queued.
  virtual int64_t bytes() const = 0;
  virtual BatchKey key() const { return {}; }
  // What executing it costs, in a unit of the executor's; it adds up over a batch. For
  // Scheduler::RunQueued, which is never given a task of unknown cost.
  virtual int64_t cost() const { return kUnknownCost; }
  static constexpr int64_t kUnknownCost = std::numeric_limits<int64_t>::max();

  // Completes the task with an error instead of executing it. Called at most once, and never after
  // the task was handed to the executor. Called without locks held.
  virtual void Fail(const absl::Status& status) = 0;

  // Larger is more urgent; 0 is normal.
  int priority = 0;
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time enqueued = absl::InfinitePast();  // set by the queue
};

}  // namespace awqd::batching
