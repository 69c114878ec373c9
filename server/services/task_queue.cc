// Threads that may block, so that gRPC's never have to.
#include "server/services/task_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace awqd::services {

TaskQueue::TaskQueue(std::string what, int threads, int64_t max_queued)
    : what_(std::move(what)), max_queued_(max_queued) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { RunTasks(); });
}

TaskQueue::~TaskQueue() { Stop(); }

absl::Status TaskQueue::Run(std::function<void()> task) {
  MutexLock lock(&mu_);
  if (stopping_) return absl::UnavailableError("the server is shutting down");
  if (static_cast<int64_t>(tasks_.size()) >= max_queued_) {
    return absl::ResourceExhaustedError(absl::StrCat(what_, ": got ", tasks_.size(),
                                                     " waiting, expected fewer than ", max_queued_,
                                                     "; try again later"));
  }
  tasks_.push_back(std::move(task));
  changed_.NotifyOne();
  return absl::OkStatus();
}

void TaskQueue::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void TaskQueue::RunTasks() {
  for (;;) {
    std::function<void()> task;
    {
      MutexLock lock(&mu_);
      while (!stopping_ && tasks_.empty()) changed_.Wait(&mu_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace awqd::services
