// A list of jobs under one lock: jobs are divided into few chunks, so the lock is seldom taken.
#include "server/engine/thread_pool.h"

#include <algorithm>

namespace awqd::engine {

Crew::Crew(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

Crew::~Crew() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    work_.NotifyAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void Crew::DoShare(Job* job) {
  const int64_t begin = job->next;
  const int64_t end = std::min(job->count, begin + job->grain);
  job->next = end;
  if (end == job->count) jobs_.remove(job);
  mu_.Unlock();
  for (int64_t i = begin; i < end; ++i) job->body(i);
  mu_.Lock();
  job->left -= end - begin;
  if (job->left == 0) done_.NotifyAll();
}

void Crew::Share(int64_t count, int64_t grain, absl::FunctionRef<void(int64_t)> body) {
  if (threads_.empty() || count <= grain) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Job job = {.body = body, .count = count, .grain = std::max<int64_t>(1, grain), .left = count};
  MutexLock lock(&mu_);
  jobs_.push_back(&job);
  // One thread for every share but the first, which is done here.
  for (int64_t share = job.grain; share < count; share += job.grain) work_.NotifyOne();
  while (job.next < job.count) DoShare(&job);
  while (job.left > 0) done_.Wait(&mu_);
}

void Crew::Work() {
  MutexLock lock(&mu_);
  for (;;) {
    while (jobs_.empty() && !stopping_) work_.Wait(&mu_);
    if (jobs_.empty()) return;
    DoShare(jobs_.front());
  }
}

}  // namespace awqd::engine
