// BatchScheduler: worker threads that take batches from a BatchQueue, and one that fails what
// expires meanwhile.
//
// Threads: Schedule, RunQueued, Cancel and queued_tasks from anywhere; Drain from anywhere but a
// worker. Task::Fail and the executor run without the lock held.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "kernels/base/mutex.h"
#include "server/batching/batch_queue.h"
#include "server/batching/clock.h"
#include "server/batching/scheduler.h"

namespace awqd::batching {

class BatchScheduler final : public Scheduler {
 public:
  // `workers`: threads that call the executor, each with one batch at a time.
  BatchScheduler(const BatchOptions& options, int workers, BatchExecutor executor,
                 const Clock* clock = &Clock::Real());
  // Drains.
  ~BatchScheduler() override;

  using Scheduler::Schedule;
  absl::StatusOr<Ticket> Schedule(std::unique_ptr<Task>* task, Runner runner) override;
  bool RunQueued(int64_t max_cost) override;
  bool Cancel(Ticket ticket) override;
  void Hurry() override;
  void Drain() override;
  int64_t queued_tasks() const override;

  // For tests: no batch leaves until `tasks` are queued (or the scheduler drains).
  void HoldUntil(int64_t tasks);
  // For tests: workers that sleep.
  int sleeping_workers() const;
  // For tests with a clock that stands still: looks at deadlines and delays again.
  void Poke();

 private:
  void Work();
  // Gives *lane back, unless it is none; the next batch and the lane that it runs on, or an empty
  // one when draining and nothing is left. Blocks.
  Batch NextBatch(int* lane);
  int TakeLane() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // No batch leaves now: a hold, or no lane.
  bool Held() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The next batch for a caller of RunQueued, and a lane; or an empty one.
  Batch BatchForCaller(absl::Time now, int64_t max_cost, int* lane)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Reap();

  const BatchExecutor executor_;
  const Clock* const clock_;
  const bool waits_for_company_;
  mutable Mutex mu_;
  CondVar work_;    // a task came, a lane came back, a hold ended, or draining began
  CondVar expiry_;  // a deadline comes before reaper_wakes_, or draining ended
  BatchQueue queue_ ABSL_GUARDED_BY(mu_);
  std::vector<int> free_lanes_ ABSL_GUARDED_BY(mu_);
  // When the reaper looks again by itself. Deadlines later than that need not wake it.
  absl::Time reaper_wakes_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  int64_t running_now_ ABSL_GUARDED_BY(mu_) = 0;  // calls of RunQueued that have a lane
  int sleeping_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t hold_until_ ABSL_GUARDED_BY(mu_) = 0;
  bool hurry_ ABSL_GUARDED_BY(mu_) = false;  // max_queue_delay no longer counts
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;  // workers are gone; the reaper goes too
  Mutex join_mu_;
  std::vector<std::thread> workers_ ABSL_GUARDED_BY(join_mu_);
  std::thread reaper_ ABSL_GUARDED_BY(join_mu_);
};

}  // namespace awqd::batching
