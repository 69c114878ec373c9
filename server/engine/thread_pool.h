// ThreadPool: threads that help a caller with many small tasks, such as the answers of a batch.
#pragma once

#include <cstdint>
#include <list>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "kernels/base/mutex.h"

namespace awqd::engine {

// Thread-safe: several callers share the pool, first come, first served.
class ThreadPool {
 public:
  // `threads` beside the callers'; 0 is legal.
  explicit ThreadPool(int threads);
  // No call of ParallelFor is in progress.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls body(i) once for every i in [0, count), on the calling thread and on the free threads of
  // the pool, and returns when all are done. A thread takes `grain` iterations at a time. A loop of
  // up to `grain` iterations runs on the calling thread alone. Must not be called from a body.
  void ParallelFor(int64_t count, int64_t grain, absl::FunctionRef<void(int64_t)> body);

 private:
  struct Loop {
    const absl::FunctionRef<void(int64_t)> body;
    const int64_t count;
    const int64_t grain;
    int64_t next = 0;  // the first that no thread has taken
    int64_t left;      // not done yet
  };

  void RunThread();
  // Runs the next chunk of the loop without the lock, and counts it as done.
  void RunChunk(Loop* loop) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  CondVar work_;                                 // a loop came, or the end
  CondVar done_;                                 // the last chunk of a loop was done
  std::list<Loop*> loops_ ABSL_GUARDED_BY(mu_);  // with chunks to take; owned by ParallelFor
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace awqd::engine
