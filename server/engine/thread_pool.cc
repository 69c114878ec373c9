// A list of loops under one lock. Loops are divided into few chunks, so the lock is seldom taken.
#include "server/engine/thread_pool.h"

#include <algorithm>

namespace awqd::engine {

ThreadPool::ThreadPool(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { RunThread(); });
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    work_.NotifyAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::RunChunk(Loop* loop) {
  const int64_t begin = loop->next;
  const int64_t end = std::min(loop->count, begin + loop->grain);
  loop->next = end;
  if (end == loop->count) loops_.remove(loop);
  mu_.Unlock();
  for (int64_t i = begin; i < end; ++i) loop->body(i);
  mu_.Lock();
  loop->left -= end - begin;
  if (loop->left == 0) done_.NotifyAll();
}

void ThreadPool::ParallelFor(int64_t count, int64_t grain, absl::FunctionRef<void(int64_t)> body) {
  if (threads_.empty() || count <= grain) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  Loop loop = {.body = body, .count = count, .grain = std::max<int64_t>(1, grain), .left = count};
  MutexLock lock(&mu_);
  loops_.push_back(&loop);
  // One thread for every chunk but the first, which runs here.
  for (int64_t begin = loop.grain; begin < count; begin += loop.grain) work_.NotifyOne();
  while (loop.next < loop.count) RunChunk(&loop);
  while (loop.left > 0) done_.Wait(&mu_);
}

void ThreadPool::RunThread() {
  MutexLock lock(&mu_);
  for (;;) {
    while (loops_.empty() && !stopping_) work_.Wait(&mu_);
    if (loops_.empty()) return;
    RunChunk(loops_.front());
  }
}

}  // namespace awqd::engine
