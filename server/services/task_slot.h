// TaskSlot: the engine's task of a call, and whether the call is still wanted.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/engine/engine.h"

namespace awqd::services {

// The task of a call that is in flight, and whether the call was cancelled. Thread-safe.
class TaskSlot {
 public:
  // A cancel that came before the handle did is applied to it at once.
  void Set(engine::TaskHandle handle) {
    {
      MutexLock lock(&mu_);
      if (!cancelled_) {
        handle_ = std::move(handle);
        return;
      }
    }
    handle.Cancel();
  }
  void Cancel() {
    engine::TaskHandle handle;
    {
      MutexLock lock(&mu_);
      cancelled_ = true;
      handle = handle_;
    }
    handle.Cancel();
  }
  bool cancelled() const {
    MutexLock lock(&mu_);
    return cancelled_;
  }

 private:
  mutable Mutex mu_;
  engine::TaskHandle handle_ ABSL_GUARDED_BY(mu_);
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

// DEADLINE_EXCEEDED or CANCELLED when there is no point in going on.
inline absl::Status StillWanted(const TaskSlot& slot, absl::Time deadline) {
  if (deadline <= absl::Now()) return absl::DeadlineExceededError("the deadline has passed");
  if (slot.cancelled()) return absl::CancelledError("the client cancelled the call");
  return absl::OkStatus();
}

}  // namespace awqd::services
