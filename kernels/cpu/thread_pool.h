// ThreadPool: a few persistent threads that share one loop at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/base/mutex.h"

namespace awqd {

// Thread-safe: loops of several callers run one after the other, but one of a single task runs on
// its caller at once.
//
// A worker that has nothing to do spins for some microseconds, because the next loop of the same
// product comes at once, then sleeps, so that an idle server costs nothing.
class ThreadPool {
 public:
  // `threads` in total, the caller of ParallelFor included; at least 1. `pin`: worker i, from 1 on,
  // runs on the i-th core after the first that the process may use, and so on from the first.
  explicit ThreadPool(int threads, bool pin = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, thread) for every task in [0, tasks), fewer than 2^32, and returns when all
  // are done. `thread` is in [0, threads()) and names the running thread's scratch, which is the
  // caller's own. Which thread takes a task is not fixed, so results must depend on the task alone.
  // Must not be called from within a body.
  void ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t task, int thread)> body);

  // Calls fn(row) for every row, of `cols` elements each: as many rows a task as have `per_task`
  // elements.
  void ForEachRow(int64_t rows, int64_t cols, int64_t per_task,
                  absl::FunctionRef<void(int64_t row)> fn);

 private:
  using Body = absl::FunctionRef<void(int64_t, int)>;

  void WorkerMain(int thread);
  void Wake(int64_t workers);
  // The next task of the loop in progress. The loop does not end before a claimed task is done.
  bool Claim(int64_t* task);
  void Drain(int thread);

  Mutex callers_;
  // The loop in progress: written before its tasks can be claimed, read by threads that claimed
  // one.
  const Body* body_ = nullptr;
  int64_t tasks_ = 0;
  // The loop's number in the upper half, so that a late worker cannot claim by an old word; how
  // many of its tasks nobody has taken in the lower half.
  alignas(64) std::atomic<uint64_t> unclaimed_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> round_{0};  // moves on when there is something to do
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace awqd
