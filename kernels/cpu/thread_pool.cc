// The pool's loop: publish it, wake as many workers as it has tasks for, take part, wait until the
// last task is done. A worker that the system does not run is not waited for: its tasks are
// others'.
#include "kernels/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

#include "kernels/base/math.h"
#include "kernels/base/process_limits.h"
#include "kernels/base/spin.h"

namespace awqd {
namespace {

// Some microseconds: bridges the gap between the loops of one product. Spinning until the next
// request comes (4000 were tried, AMD EPYC, 2 cores, 2026-11-21) took a core from gRPC's threads:
// a third of the server's CPU time with 32 callers.
constexpr int kSpins = 100;

constexpr uint64_t kLeftMask = 0xffffffff;

// Returns the value of `word` once it differs from `old`.
template <typename T>
T AwaitChange(const std::atomic<T>& word, T old) {
  for (int i = 0; i < kSpins; ++i) {
    const T now = word.load(std::memory_order_acquire);
    if (now != old) return now;
    CpuRelax();
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

// A core that went offline meanwhile leaves the thread where it may run anyway.
void PinTo(int core, std::thread* thread) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(core, &mask);
  (void)pthread_setaffinity_np(thread->native_handle(), sizeof(mask), &mask);
}

}  // namespace

ThreadPool::ThreadPool(int threads, bool pin) {
  const std::vector<int> cores = pin ? UsableCores() : std::vector<int>();
  for (int i = 1; i < threads; ++i) {
    workers_.emplace_back([this, i] { WorkerMain(i); });
    if (!cores.empty()) PinTo(cores[i % cores.size()], &workers_.back());
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::Claim(int64_t* task) {
  uint64_t word = unclaimed_.load(std::memory_order_acquire);
  while ((word & kLeftMask) != 0) {
    if (!unclaimed_.compare_exchange_weak(word, word - 1, std::memory_order_acquire)) continue;
    *task = tasks_ - static_cast<int64_t>(word & kLeftMask);
    return true;
  }
  return false;
}

void ThreadPool::Drain(int thread) {
  uint32_t done = 0;
  for (int64_t task = 0; Claim(&task); ++done) (*body_)(task, thread);
  if (done == 0) return;
  if (unfinished_.fetch_sub(done, std::memory_order_acq_rel) == done) unfinished_.notify_one();
}

void ThreadPool::WorkerMain(int thread) {
  for (uint32_t seen = 0; !stop_.load(std::memory_order_relaxed);) {
    seen = AwaitChange(round_, seen);
    Drain(thread);
  }
}

void ThreadPool::Wake(int64_t workers) {
  round_.fetch_add(1, std::memory_order_release);
  if (workers >= static_cast<int64_t>(workers_.size())) return round_.notify_all();
  for (; workers > 0; --workers) round_.notify_one();
}

void ThreadPool::ParallelFor(int64_t tasks, Body body) {
  if (workers_.empty() || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  MutexLock lock(&callers_);
  body_ = &body;
  tasks_ = tasks;
  unfinished_.store(static_cast<uint32_t>(tasks), std::memory_order_relaxed);
  const uint64_t loop = (unclaimed_.load(std::memory_order_relaxed) | kLeftMask) + 1;
  unclaimed_.store(loop | static_cast<uint64_t>(tasks), std::memory_order_release);
  Wake(tasks - 1);
  Drain(0);
  for (uint32_t left = unfinished_.load(std::memory_order_acquire); left != 0;) {
    left = AwaitChange(unfinished_, left);
  }
}

void ThreadPool::ForEachRow(int64_t rows, int64_t cols, int64_t per_task,
                            absl::FunctionRef<void(int64_t)> fn) {
  const int64_t each = std::max<int64_t>(1, per_task / std::max<int64_t>(1, cols));
  ParallelFor(CeilDiv(rows, each), [&](int64_t task, int) {
    for (int64_t row = task * each; row < std::min(rows, (task + 1) * each); ++row) fn(row);
  });
}

}  // namespace awqd
