// Scheduler: accepts tasks, decides when and in which company they run.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "server/batching/task.h"

namespace awqd {

// Runs a closed batch on the calling worker's thread and completes every task in it. `worker`
// numbers the threads from 0, so that an executor can keep one lane (stream, buffers) per worker.
// Must not throw.
using BatchExecutor = std::function<void(int worker, std::vector<std::unique_ptr<Task>> batch)>;

class Scheduler {
 public:
  virtual ~Scheduler() = default;

  // Never blocks. Takes ownership only on OK; then exactly one of Task::Fail and the executor gets
  // the task. RESOURCE_EXHAUSTED when the queue is full, UNAVAILABLE when draining.
  virtual absl::Status Schedule(std::unique_ptr<Task>* task) = 0;

  // Refuses new tasks from now on and returns once every accepted one has been completed.
  virtual void Drain() = 0;

  // Accepted and not yet handed to the executor.
  virtual int64_t queued_tasks() const = 0;
};

}  // namespace awqd
