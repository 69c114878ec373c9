// Rendezvous: proves that several threads are at a point at the same time.
#pragma once

#include <chrono>

#include "absl/base/thread_annotations.h"
#include "kernels/base/mutex.h"

namespace awqd::testing {

class Rendezvous {
 public:
  explicit Rendezvous(int threads) : threads_(threads) {}

  // Waits until all threads are here; gives up after ten seconds, so that a failing test ends.
  void Meet() {
    MutexLock lock(&mu_);
    const int round = met_;
    if (++here_ == threads_) {
      here_ = 0;
      ++met_;
      all_here_.NotifyAll();
      return;
    }
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + std::chrono::seconds(10);
    while (met_ == round && Clock::now() < end) all_here_.WaitUntil(&mu_, end);
    if (met_ == round) --here_;
  }
  // The number of times that all have met.
  int met() const {
    MutexLock lock(&mu_);
    return met_;
  }

 private:
  const int threads_;
  mutable Mutex mu_;
  CondVar all_here_;
  int here_ ABSL_GUARDED_BY(mu_) = 0;
  int met_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace awqd::testing
