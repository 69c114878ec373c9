// FifoScheduler: bounded queue, worker threads, drain.
#include "server/batching/fifo_scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace awqd {
namespace {

// Why a task must not run, or OK.
absl::Status Fate(const Task& task, absl::Time now) {
  if (task.cancelled()) return absl::CancelledError("cancelled by the client while queued");
  if (task.deadline <= now) {
    return absl::DeadlineExceededError(absl::StrCat(
        "deadline passed after ", absl::FormatDuration(now - task.enqueued), " in the queue"));
  }
  return absl::OkStatus();
}

}  // namespace

FifoScheduler::FifoScheduler(const FifoOptions& options, BatchExecutor executor, const Clock* clock)
    : options_(options), executor_(std::move(executor)), clock_(clock) {
  MutexLock lock(&join_mu_);
  for (int worker = 0; worker < std::max(1, options_.workers); ++worker) {
    threads_.emplace_back([this, worker] { Work(worker); });
  }
}

FifoScheduler::~FifoScheduler() { Drain(); }

absl::Status FifoScheduler::Schedule(std::unique_ptr<Task>* task) {
  const int64_t bytes = (*task)->bytes();
  MutexLock lock(&mu_);
  if (draining_) return absl::UnavailableError("the server is draining");
  if (queued_tasks_ >= options_.max_queued_tasks) {
    return absl::ResourceExhaustedError(absl::StrCat("queue full: ", queued_tasks_,
                                                     " requests queued, the limit is ",
                                                     options_.max_queued_tasks));
  }
  // A lone task larger than the bound is let in: the bound is on what waits, not on what a request
  // may be.
  if (queued_tasks_ > 0 && bytes > options_.max_queued_bytes - queued_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("queue full: ", queued_bytes_, " bytes queued and ", bytes,
                     " more asked for, the limit is ", options_.max_queued_bytes));
  }
  (*task)->enqueued = clock_->Now();
  queued_tasks_ += 1;
  queued_bytes_ += bytes;
  queues_[(*task)->priority].push_back(std::move(*task));
  wake_.NotifyOne();
  return absl::OkStatus();
}

void FifoScheduler::Drain() {
  {
    MutexLock lock(&mu_);
    draining_ = true;
    wake_.NotifyAll();
  }
  MutexLock lock(&join_mu_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

int64_t FifoScheduler::queued_tasks() const {
  MutexLock lock(&mu_);
  return queued_tasks_;
}

void FifoScheduler::Work(int worker) {
  while (std::unique_ptr<Task> task = Next()) {
    if (absl::Status fate = Fate(*task, clock_->Now()); !fate.ok()) {
      task->Fail(fate);
      continue;
    }
    std::vector<std::unique_ptr<Task>> batch;
    batch.push_back(std::move(task));
    executor_(worker, std::move(batch));
  }
}

std::unique_ptr<Task> FifoScheduler::Next() {
  MutexLock lock(&mu_);
  wake_.Wait(&mu_,
             [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return draining_ || queued_tasks_ > 0; });
  return queued_tasks_ > 0 ? PopLocked() : nullptr;
}

std::unique_ptr<Task> FifoScheduler::PopLocked() {
  const auto first = queues_.begin();
  std::unique_ptr<Task> task = std::move(first->second.front());
  first->second.pop_front();
  if (first->second.empty()) queues_.erase(first);
  queued_tasks_ -= 1;
  queued_bytes_ -= task->bytes();
  return task;
}

}  // namespace awqd
