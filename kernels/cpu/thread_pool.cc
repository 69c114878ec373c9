// The pool's round: publish a loop, wake the workers, take part, wait until the last one is out.
#include "kernels/cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

#include "absl/strings/numbers.h"

namespace awqd {
namespace {

// Long enough to bridge the gap between the products of one decode step, short enough to be
// nothing beside the work.
constexpr int kSpins = 4000;

void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

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

// cgroup v2 "max 100000" or "200000 100000"; 0 when there is no quota.
int QuotaThreads() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0, value = 0;
  if (!(file >> quota >> period) || period <= 0 || !absl::SimpleAtod(quota, &value)) return 0;
  return std::max(1, static_cast<int>(std::ceil(value / period)));
}

}  // namespace

int UsableThreads() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) threads = CPU_COUNT(&mask);
  if (const int quota = QuotaThreads(); quota > 0) threads = std::min(threads, quota);
  return std::max(threads, 1);
}

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) {
    workers_.emplace_back([this, i] { WorkerMain(i); });
  }
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Drain(int thread) {
  for (;;) {
    const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) return;
    (*body_)(task, thread);
  }
}

void ThreadPool::WorkerMain(int thread) {
  uint32_t seen = 0;
  for (;;) {
    seen = AwaitChange(round_, seen);
    if (stop_) return;
    Drain(thread);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

void ThreadPool::ParallelFor(int64_t tasks, Body body) {
  if (tasks <= 0) return;
  MutexLock lock(&callers_);
  if (workers_.empty() || tasks == 1) {
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  body_ = &body;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  // Every worker passes through every round, so that none can meet a later round's loop half set.
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  Drain(0);
  for (int left = busy_.load(std::memory_order_acquire); left != 0;) {
    left = AwaitChange(busy_, left);
  }
}

}  // namespace awqd
