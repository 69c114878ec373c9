// BatchScheduler: the threads around a BatchQueue.
#include "server/batching/batch_scheduler.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace awqd {
namespace {

// A moment of the injected clock as one that a condition variable can wait for. Far moments are
// looked at again after a minute, so that nothing overflows.
std::chrono::steady_clock::time_point WakeAt(absl::Time moment, absl::Time now) {
  const absl::Duration wait = std::clamp(moment - now, absl::ZeroDuration(), absl::Minutes(1));
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(wait);
}

void FailExpired(std::vector<std::unique_ptr<Task>> expired, absl::Time now) {
  for (std::unique_ptr<Task>& task : expired) {
    task->Fail(absl::DeadlineExceededError(absl::StrCat(
        "deadline passed after ", absl::FormatDuration(now - task->enqueued), " in the queue")));
  }
}

}  // namespace

BatchScheduler::BatchScheduler(const BatchOptions& options, int workers, BatchExecutor executor,
                               const Clock* clock)
    : executor_(std::move(executor)), clock_(clock), queue_(options) {
  MutexLock lock(&join_mu_);
  for (int worker = 0; worker < std::max(1, workers); ++worker) {
    workers_.emplace_back([this, worker] { Work(worker); });
  }
  reaper_ = std::thread([this] { Reap(); });
}

BatchScheduler::~BatchScheduler() { Drain(); }

absl::StatusOr<Ticket> BatchScheduler::Schedule(std::unique_ptr<Task>* task) {
  const absl::Time deadline = (*task)->deadline;
  MutexLock lock(&mu_);
  if (draining_) return absl::UnavailableError("the server is draining");
  const bool first_to_expire = deadline < queue_.NextDeadline();
  absl::StatusOr<Ticket> ticket = queue_.Push(task, clock_->Now());
  if (!ticket.ok()) return ticket;
  work_.NotifyOne();
  if (first_to_expire) expiry_.NotifyOne();
  return ticket;
}

bool BatchScheduler::Cancel(Ticket ticket) {
  std::unique_ptr<Task> task;
  {
    MutexLock lock(&mu_);
    task = queue_.Remove(ticket);
  }
  if (task == nullptr) return false;
  task->Fail(absl::CancelledError("cancelled by the client while queued"));
  return true;
}

void BatchScheduler::Hurry() {
  MutexLock lock(&mu_);
  hurry_ = true;
  work_.NotifyAll();
}

void BatchScheduler::Drain() {
  {
    MutexLock lock(&mu_);
    hurry_ = draining_ = true;
    work_.NotifyAll();
  }
  MutexLock lock(&join_mu_);
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  {
    MutexLock queue_lock(&mu_);
    stopped_ = true;
    expiry_.NotifyAll();
  }
  if (reaper_.joinable()) reaper_.join();
}

int64_t BatchScheduler::queued_tasks() const {
  MutexLock lock(&mu_);
  return queue_.size();
}

void BatchScheduler::HoldUntil(int64_t tasks) {
  MutexLock lock(&mu_);
  hold_until_ = tasks;
}

void BatchScheduler::Poke() {
  MutexLock lock(&mu_);
  work_.NotifyAll();
  expiry_.NotifyAll();
}

void BatchScheduler::Work(int worker) {
  for (Batch batch = NextBatch(); !batch.empty(); batch = NextBatch()) {
    executor_(worker, std::move(batch));
  }
}

Batch BatchScheduler::NextBatch() {
  for (;;) {
    std::vector<std::unique_ptr<Task>> expired;
    absl::Time now;
    {
      MutexLock lock(&mu_);
      now = clock_->Now();
      // What expired leaves before a batch is formed, whether or not the reaper was quick enough.
      expired = queue_.TakeExpired(now);
      if (expired.empty()) {
        const bool held = !hurry_ && queue_.size() < hold_until_;
        if (!held) {
          hold_until_ = 0;
          if (Batch batch = queue_.Pop(now, hurry_); !batch.empty()) {
            if (queue_.size() > 0) work_.NotifyOne();
            return batch;
          }
          if (draining_) return Batch();
        }
        const absl::Time next = held ? absl::InfiniteFuture() : queue_.NextBatch(hurry_);
        if (next == absl::InfiniteFuture()) {
          work_.Wait(&mu_);
        } else {
          work_.WaitUntil(&mu_, WakeAt(next, now));
        }
        continue;
      }
    }
    FailExpired(std::move(expired), now);
  }
}

void BatchScheduler::Reap() {
  for (;;) {
    std::vector<std::unique_ptr<Task>> expired;
    absl::Time now;
    {
      MutexLock lock(&mu_);
      if (stopped_) return;
      now = clock_->Now();
      expired = queue_.TakeExpired(now);
      if (expired.empty()) {
        const absl::Time next = queue_.NextDeadline();
        if (next == absl::InfiniteFuture()) {
          expiry_.Wait(&mu_);
        } else {
          expiry_.WaitUntil(&mu_, WakeAt(next, now));
        }
        continue;
      }
    }
    FailExpired(std::move(expired), now);
  }
}

}  // namespace awqd
