// TaskQueue: a bounded queue and a few threads, for tasks that block and so must not run on the
// threads of the loop: loading models, packing inline weights.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/base/mutex.h"

namespace awqd::services {

class TaskQueue {
 public:
  // `what` names the tasks in the error of a full queue: "loads".
  TaskQueue(std::string what, int threads, int64_t max_queued);
  // Runs everything that was accepted, then joins.
  ~TaskQueue();

  // Never blocks. RESOURCE_EXHAUSTED when max_queued tasks wait; UNAVAILABLE after Stop. Tasks do
  // not throw.
  absl::Status Run(std::function<void()> task);

  // Refuses new tasks and returns when every accepted one has run.
  void Stop();

 private:
  void RunTasks();
  const std::string what_;
  const int64_t max_queued_;
  Mutex mu_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace awqd::services
