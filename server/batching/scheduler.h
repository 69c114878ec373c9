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

// Runs a batch on the calling worker's thread and completes every task in it. `worker` numbers the
// threads from 0, so that an executor can keep one lane (stream, buffers) per worker. Must not
// throw.
using BatchExecutor = std::function<void(int worker, Batch batch)>;

// Names an accepted task; never reused within a scheduler.
using Ticket = uint64_t;

class Scheduler {
 public:
  virtual ~Scheduler() = default;

  // Never blocks. Takes ownership only on OK; then exactly one of Task::Fail and the executor gets
  // the task. RESOURCE_EXHAUSTED when the queue is full, UNAVAILABLE when draining.
  virtual absl::StatusOr<Ticket> Schedule(std::unique_ptr<Task>* task) = 0;

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
