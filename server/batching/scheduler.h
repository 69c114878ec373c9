// Scheduler: accepts tasks, decides when and in which company they run.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/batching/batch.h"
#include "server/batching/task.h"

namespace awqd {

// Runs a batch on the calling thread and completes every task in it. `lane` is one of as many as
// there are workers, and nobody else's until the call returns, so that an executor can keep a
// stream and buffers for each. Must not throw.
using BatchExecutor = std::function<void(int lane, Batch batch)>;

// Names an accepted task; never reused within a scheduler.
using Ticket = uint64_t;

class Scheduler {
 public:
  virtual ~Scheduler() = default;

  // Never blocks. Takes ownership only on OK; then exactly one of Task::Fail and the executor gets
  // the task. RESOURCE_EXHAUSTED when the queue is full, UNAVAILABLE when draining.
  virtual absl::StatusOr<Ticket> Schedule(std::unique_ptr<Task>* task) = 0;

  // Runs the task on the calling thread, if it would be a batch of its own that starts at once: a
  // lane is free and nothing waits. False, and the task stays the caller's, otherwise. For tasks so
  // short that handing them to a worker would cost more. Blocks as long as the task runs.
  virtual bool RunNow(std::unique_ptr<Task>* task) = 0;

  // Takes a queued task out at once and fails it with CANCELLED. False when it is no longer queued.
  virtual bool Cancel(Ticket ticket) = 0;

  // From now on nothing waits for company: for shutting down while calls in progress still bring
  // tasks.
  virtual void Hurry() = 0;

  // Refuses new tasks from now on and returns once every accepted one has been completed.
  virtual void Drain() = 0;

  // Accepted and not yet handed to the executor.
  virtual int64_t queued_tasks() const = 0;
};

}  // namespace awqd
