// Threads that may block, so that gRPC's never have to.
#include "server/services/task_queue.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace awqd::services {

Worker::Worker(std::string what, int threads, int64_t max_queued)
    : what_(std::move(what)), max_queued_(max_queued) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
}

Worker::~Worker() { Stop(); }

absl::Status Worker::Run(std::function<void()> job) {
  MutexLock lock(&mu_);
  if (stopping_) return absl::UnavailableError("the server is shutting down");
  if (static_cast<int64_t>(jobs_.size()) >= max_queued_) {
    return absl::ResourceExhaustedError(absl::StrCat(what_, ": got ", jobs_.size(),
                                                     " waiting, expected fewer than ", max_queued_,
                                                     "; try again later"));
  }
  jobs_.push_back(std::move(job));
  changed_.NotifyOne();
  return absl::OkStatus();
}

void Worker::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void Worker::Loop() {
  for (;;) {
    std::function<void()> job;
    {
      MutexLock lock(&mu_);
      while (!stopping_ && jobs_.empty()) changed_.Wait(&mu_);
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
  }
}

}  // namespace awqd::services
