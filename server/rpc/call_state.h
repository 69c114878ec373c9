// What the calls that run on the engine share: withdrawing a task, deadlines, the response's
// Execution.
#pragma once

#include <chrono>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "awqd/v1/tensor.pb.h"
#include "kernels/base/mutex.h"
#include "server/engine/engine.h"

namespace awqd {

// The task of a call that is in flight, and whether the call was cancelled. Thread-safe.
class TaskSlot {
 public:
  // A cancel that came before the handle did is applied to it at once.
  void Set(TaskHandle handle) {
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
    TaskHandle handle;
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
  TaskHandle handle_ ABSL_GUARDED_BY(mu_);
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

inline absl::Time DeadlineOf(std::chrono::system_clock::time_point deadline) {
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return absl::FromChrono(deadline);
}

// DEADLINE_EXCEEDED or CANCELLED when there is no point in going on.
inline absl::Status StillWanted(const TaskSlot& slot, absl::Time deadline) {
  if (deadline <= absl::Now()) return absl::DeadlineExceededError("the deadline has passed");
  if (slot.cancelled()) return absl::CancelledError("the client cancelled the call");
  return absl::OkStatus();
}

inline void FillExecution(const ExecutionReport& report, v1::Execution* out) {
  out->set_path(report.path == Path::kFused ? v1::FUSED : v1::DEQUANTIZE);
  out->set_kernel(report.kernel);
  out->set_device(report.device);
  out->set_batch_tokens(report.batch_tokens);
  out->set_batch_requests(report.batch_requests);
  out->set_queue_us(report.queue_us);
  out->set_compute_us(report.compute_us);
}

}  // namespace awqd
