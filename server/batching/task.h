// Task: one request as the queue sees it, and Batch: tasks that leave the queue together. The
// batching room knows a task's size, its urgency and how it ends, never what it computes.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace awqd::batching {

// Tasks with equal keys may run as one batch: the same operation, weights and element types. A null
// subject never merges.
struct BatchKey {
  const void* subject = nullptr;
  uint64_t variant = 0;
  const void* kind = nullptr;               // tasks of different kinds never merge
  std::array<const void*, 5> further = {};  // subjects of an operation that has several
  std::array<float, 4> constants = {};      // of the operation's arithmetic

  friend bool operator==(const BatchKey&, const BatchKey&) = default;
};

// The run time of a task depends on this besides its load. Without an operation it is not learned.
struct RunKey {
  const void* operation = nullptr;
  uint64_t shape = 0;  // of what it works on, as a hash

  friend bool operator==(const RunKey&, const RunKey&) = default;
};

class Task {
 public:
  virtual ~Task() = default;

  // Tokens; batches are bounded by their sum. 0 is legal.
  virtual int64_t tokens() const = 0;
  // Bytes of payload that the task holds while it is queued.
  virtual int64_t bytes() const = 0;
  virtual BatchKey key() const { return {}; }
  // Rows of the result, which its run time grows with. The load of a batch is the sum over its
  // tasks.
  virtual int64_t load() const { return tokens(); }
  // Equal for tasks with equal keys.
  virtual RunKey run_key() const { return {}; }
  // The cost of running it, in a unit that the executor chooses. The cost of a batch is the sum
  // over its tasks. BatchScheduler::RunQueued compares it with what its caller allows, and never
  // runs a task of unknown cost.
  virtual int64_t cost() const { return kUnknownCost; }
  static constexpr int64_t kUnknownCost = std::numeric_limits<int64_t>::max();

  // Completes the task with an error instead of executing it. Called at most once, and never after
  // the task was handed to the executor. Called without locks held.
  virtual void Fail(const absl::Status& status) = 0;

  // Larger is more urgent; 0 is normal.
  int priority = 0;
  absl::Time deadline = absl::InfiniteFuture();
  // The time that sending the result takes, as far as is known: it must be there before.
  absl::Duration to_send;
  absl::Time due() const { return deadline - to_send; }
  absl::Time enqueued = absl::InfinitePast();  // set by the queue
};

// Nothing joins a batch once it has left.
struct Batch {
  // One task, or several with equal keys; in the order in which their rows are concatenated.
  std::vector<std::unique_ptr<Task>> tasks;
  int64_t tokens = 0;  // sum over tasks
  int64_t load = 0;    // sum over tasks
  RunKey run_key;
  absl::Duration expected;  // run time; zero if unknown

  bool empty() const { return tasks.empty(); }
};

}  // namespace awqd::batching
