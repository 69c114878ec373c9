// Pause: the wait of a periodic thread, cut short by the end of its owner.
#pragma once

#include <chrono>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace awqd {

// Thread-safe.
class Pause {
 public:
  // Waits for `duration`. Returns false, at once, after End.
  bool WaitFor(absl::Duration duration) {
    const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(duration);
    MutexLock lock(&mu_);
    while (!ended_ && std::chrono::steady_clock::now() < until) over_.WaitUntil(&mu_, until);
    return !ended_;
  }
  void End() {
    MutexLock lock(&mu_);
    ended_ = true;
    over_.NotifyAll();
  }

 private:
  Mutex mu_;
  CondVar over_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace awqd
