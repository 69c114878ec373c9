// TaskQueue: a bounded queue and a few threads, for tasks that block and so must not run on the
// threads of the loop: loading models, packing inline weights.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"

namespace awqd::services {

class TaskQueue {
 public:
  // `what` names the tasks in the error of a full queue: "loads".
  TaskQueue(std::string what, int threads, int64_t max_queued)
      : what_(std::move(what)), max_queued_(max_queued) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { RunTasks(); });
  }
  // Runs everything that was accepted, then joins.
  ~TaskQueue() { Stop(); }

  // Never blocks. RESOURCE_EXHAUSTED when max_queued tasks wait; UNAVAILABLE after Stop. Tasks do
  // not throw.
  absl::Status Run(std::function<void()> task) {
    MutexLock lock(&mu_);
    if (stopping_) return absl::UnavailableError("the server is shutting down");
    if (static_cast<int64_t>(tasks_.size()) >= max_queued_) {
      return absl::ResourceExhaustedError(absl::StrCat(what_, ": got ", tasks_.size(),
                                                       " waiting, expected fewer than ",
                                                       max_queued_, "; try again later"));
    }
    tasks_.push_back(std::move(task));
    changed_.NotifyOne();
    return absl::OkStatus();
  }

  // Refuses new tasks and returns when every accepted one has run.
  void Stop() {
    {
      MutexLock lock(&mu_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

 private:
  void RunTasks() {
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

  const std::string what_;
  const int64_t max_queued_;
  Mutex mu_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace awqd::services
