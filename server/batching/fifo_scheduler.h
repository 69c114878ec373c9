// FifoScheduler: runs tasks one at a time, most urgent priority first, first come first served
// within one.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/base/mutex.h"
#include "server/batching/clock.h"
#include "server/batching/scheduler.h"
#include "server/batching/task.h"

namespace awqd {

struct FifoOptions {
  int workers = 1;  // threads that call the executor, each with one task at a time
  int64_t max_queued_tasks = 1024;
  int64_t max_queued_bytes = int64_t{512} << 20;
};

// Invariants, held whenever mu_ is free:
//  - queued_tasks_ and queued_bytes_ are the sums over queues_, and never pass their bounds;
//  - no queue in queues_ is empty;
//  - a task is in exactly one of: queues_, one worker's hands, completed;
//  - once draining_ is set no task enters queues_.
class FifoScheduler final : public Scheduler {
 public:
  FifoScheduler(const FifoOptions& options, BatchExecutor executor,
                const Clock* clock = &Clock::Real());
  // Drains.
  ~FifoScheduler() override;

  absl::Status Schedule(std::unique_ptr<Task>* task) override;
  void Drain() override;
  int64_t queued_tasks() const override;

 private:
  void Work(int worker);
  // The next task, or null when draining and empty. Blocks.
  std::unique_ptr<Task> Next();
  std::unique_ptr<Task> PopLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const FifoOptions options_;
  const BatchExecutor executor_;
  const Clock* const clock_;
  mutable Mutex mu_;
  CondVar wake_;  // a task came, or draining began
  std::map<int, std::deque<std::unique_ptr<Task>>, std::greater<>> queues_ ABSL_GUARDED_BY(mu_);
  int64_t queued_tasks_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t queued_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  Mutex join_mu_;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(join_mu_);
};

}  // namespace awqd
