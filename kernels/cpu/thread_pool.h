// ThreadPool: a few persistent threads that share one loop at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/base/mutex.h"

namespace awqd {

// Thread-safe: loops of several callers run one after the other.
//
// A worker that has nothing to do spins for some microseconds, because a decode step calls again at
// once, then sleeps, so that an idle server costs nothing.
class ThreadPool {
 public:
  // `threads` in total, the caller of ParallelFor included; at least 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, thread) for every task in [0, tasks) and returns when all are done. `thread`
  // is in [0, threads()) and names the running thread's scratch. Which thread takes a task is
  // not fixed, so results must depend on the task alone. Must not be called from within a body.
  void ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t task, int thread)> body);

 private:
  using Body = absl::FunctionRef<void(int64_t, int)>;

  void WorkerMain(int thread);
  void Drain(int thread);

  Mutex callers_;
  // The loop in progress. Written before round_ moves on, read after; next_ hands out tasks.
  const Body* body_ = nullptr;
  int64_t tasks_ = 0;
  bool stop_ = false;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> busy_{0};
  std::vector<std::thread> workers_;
};

// Threads that the process may run on: its affinity mask, capped by a cgroup CPU quota.
int UsableThreads();

}  // namespace awqd
