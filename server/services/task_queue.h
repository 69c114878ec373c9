// Worker: a few threads and a bounded queue, for work that blocks and so must not run on the
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

class Worker {
 public:
  // `what` names the work in the error of a full queue: "loads".
  Worker(std::string what, int threads, int64_t max_queued);
  // Runs everything that was accepted, then joins.
  ~Worker();

  // Never blocks. RESOURCE_EXHAUSTED when max_queued jobs wait; UNAVAILABLE after Stop. Jobs do not
  // throw.
  absl::Status Run(std::function<void()> job);

  // Refuses new jobs and returns when every accepted one has run.
  void Stop();

 private:
  void Loop();
  const std::string what_;
  const int64_t max_queued_;
  Mutex mu_;
  CondVar changed_;
  std::deque<std::function<void()>> jobs_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace awqd::services
