// Scheduler: accepts tasks, decides when they run and with which others.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/batching/batch.h"
#include "server/batching/task.h"

namespace awqd::batching {

// Runs a batch on the calling thread and completes every task in it. There are as many lanes as
// workers, numbered from 0. Until the call returns no other call has this lane, so that an executor
// can keep a stream and buffers for each. Must not throw.
using BatchExecutor = std::function<void(int lane, Batch batch)>;

// Names an accepted task; never reused within a scheduler.
using Ticket = uint64_t;

// Who sees to it that an accepted task runs.
enum class Runner {
  kWorker,  // a worker is woken, if one has nothing to do
  kCaller,  // the calling thread, which will call RunQueued soon; no worker is woken
};

class Scheduler {
 public:
  virtual ~Scheduler() = default;

  // Never blocks. Takes ownership only on OK; then exactly one of Task::Fail and the executor gets
  // the task. RESOURCE_EXHAUSTED when the queue is full, UNAVAILABLE when draining.
  virtual absl::StatusOr<Ticket> Schedule(std::unique_ptr<Task>* task, Runner runner) = 0;
  absl::StatusOr<Ticket> Schedule(std::unique_ptr<Task>* task) {
    return Schedule(task, Runner::kWorker);
  }

  // Runs the next batch on the calling thread, if it costs no more than `max_cost` and a lane is
  // free. For threads that bring tasks so short that waking a worker would cost more. True: tasks
  // are left for this thread, which sees to its other duties and calls again. False: what is queued
  // is taken by a worker, or by the thread that has the lane.
  virtual bool RunQueued(int64_t max_cost) = 0;

  // Takes a queued task out at once and fails it with CANCELLED. False when it is no longer queued.
  virtual bool Cancel(Ticket ticket) = 0;

  // From now on no task waits for others to merge with. For shutting down, while calls in progress
  // still bring tasks.
  virtual void Hurry() = 0;

  // Refuses new tasks from now on and returns once every accepted one has been completed.
  virtual void Drain() = 0;

  // Accepted and not yet handed to the executor.
  virtual int64_t queued_tasks() const = 0;
};

}  // namespace awqd::batching
