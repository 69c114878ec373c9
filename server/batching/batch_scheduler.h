// BatchScheduler: worker threads that take batches from a BatchQueue, and the reaper, a thread that
// fails tasks whose deadline passes while they wait.
//
// Threads: Schedule, RunQueued, Cancel and queued_tasks may be called on any thread, Drain on any
// but a worker. Task::Fail and the executor are called without the lock held.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/batching/batch_queue.h"

namespace awqd::batching {

// Runs a batch on the calling thread and completes every task in it. There are as many lanes as
// workers, numbered from 0. Two calls at the same time never have the same lane, so an executor can
// keep a stream and buffers for each lane. Must not throw.
using BatchExecutor = std::function<void(int lane, Batch batch)>;

// The present; tests hold it still.
using NowFunction = std::function<absl::Time()>;

// The thread that runs an accepted task.
enum class Runner {
  kWorker,  // a worker: one is woken, if one is idle
  kCaller,  // the calling thread: it will call RunQueued soon, and no worker is woken
};

// Counts of tasks that were not run.
struct SchedulerCounts {
  BatchQueue::Refused refused;   // on submission, by the queue
  int64_t refused_draining = 0;  // on submission: the scheduler drained
  int64_t expired = 0;           // they could not have met their deadlines any more
  int64_t cancelled = 0;         // in the queue
};

class BatchScheduler {
 public:
  // `workers`: threads that call the executor, each with one batch at a time.
  BatchScheduler(const BatchOptions& options, int workers, BatchExecutor executor,
                 NowFunction now = absl::Now);
  // Drains.
  ~BatchScheduler();

  // Never blocks. Takes ownership only on OK; then exactly one of Task::Fail and the executor gets
  // the task. RESOURCE_EXHAUSTED when the queue is full or its turn would come too late, UNAVAILABLE
  // when draining.
  absl::StatusOr<Ticket> Schedule(std::unique_ptr<Task>* task, Runner runner = Runner::kWorker);

  // As BatchQueue::CheckArrival.
  absl::Status CheckArrival(absl::Time deadline);

  // As BatchQueue::RecordAnswer.
  void RecordAnswer(bool in_time);

  // Runs the next batch on the calling thread, if it costs no more than `max_cost` and a lane is
  // free; with `alone` only a task that is alone, queued or running, and is not known to take over a
  // millisecond. Meant for tasks so short that waking a worker would cost more. True: tasks are left
  // and this thread must call again; it may do other things before. False: nothing is left, or a
  // worker or the thread that has the lane will take it.
  bool RunQueued(int64_t max_cost, bool alone = false);

  // Takes a queued task out at once and fails it with CANCELLED. False when it is no longer queued.
  bool Cancel(Ticket ticket);

  // From now on no task waits for others to merge with. For a shutdown, while calls in progress
  // still schedule tasks.
  void Hurry();

  // Learns from a batch that ran elsewhere, as warm-up does.
  void RecordRun(const RunKey& key, int64_t load, absl::Duration took);

  // Refuses new tasks from now on and returns once every accepted one has been completed.
  void Drain();

  // Tasks that were accepted and not yet handed to the executor.
  int64_t queued_tasks() const;
  SchedulerCounts counts() const;

  // For tests: no batch leaves until `tasks` tasks are queued or the scheduler drains.
  void HoldUntil(int64_t tasks);
  // For tests: how many workers sleep.
  int sleeping_workers() const;
  // For tests with a clock that stands still: looks at deadlines and delays again.
  void Poke();

 private:
  void Work();
  // Gives *lane back if there is one. Then waits for the next batch, and sets *lane to the lane
  // that it runs on. Returns an empty batch when the scheduler drains and nothing is left.
  Batch NextBatch(int* lane);
  // Takes a free lane for the batch.
  int TakeLane(const Batch& batch, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Gives it back, and learns how long the batch took.
  void ReturnLane(int lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The time left of the batches that run, summed, as far as is known.
  absl::Duration RunningTime(absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // True when no batch may leave now: because of HoldUntil, or because no lane is free.
  bool Held() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The next batch for a caller of RunQueued, and a lane for it; or an empty batch.
  Batch BatchForCaller(absl::Time now, int64_t max_cost, bool alone, int* lane)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Reap();
  // Takes out what has expired, and counts it.
  std::vector<std::unique_ptr<Task>> TakeExpired(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const BatchExecutor executor_;
  const NowFunction now_;
  const bool waits_for_company_;
  mutable Mutex mu_;
  CondVar work_;    // a task came, a lane was given back, a hold ended, or draining began
  CondVar expiry_;  // a task came that expires before reaper_wakes_, or draining ended
  BatchQueue queue_ ABSL_GUARDED_BY(mu_);
  SchedulerCounts counts_ ABSL_GUARDED_BY(mu_);
  struct Run {
    RunKey key;
    int64_t load = 0;
    absl::Time start;
    absl::Duration expected;
  };
  std::vector<Run> runs_ ABSL_GUARDED_BY(mu_);  // by lane
  std::vector<int> free_lanes_ ABSL_GUARDED_BY(mu_);
  // When the reaper wakes by itself. What expires later need not wake it.
  absl::Time reaper_wakes_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  int64_t running_now_ ABSL_GUARDED_BY(mu_) = 0;  // calls of RunQueued that have a lane
  int sleeping_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t hold_until_ ABSL_GUARDED_BY(mu_) = 0;
  bool hurry_ ABSL_GUARDED_BY(mu_) = false;  // max_queue_delay no longer counts
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;  // workers have ended; the reaper must end too
  Mutex join_mu_;
  std::vector<std::thread> workers_ ABSL_GUARDED_BY(join_mu_);
  std::thread reaper_ ABSL_GUARDED_BY(join_mu_);
};

}  // namespace awqd::batching
