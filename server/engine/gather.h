// Gather: one request whose parts several devices compute; puts their answers together.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/base/mutex.h"
#include "server/engine/engine.h"

namespace awqd::engine {

// Thread-safe. Each part's answer is copied on the thread that brings it, so that devices copy side
// by side; the last part to end answers the request.
class Gather : public std::enable_shared_from_this<Gather> {
 public:
  // What helps to put results together. Outlives the parts.
  struct Helpers {
    StagingPool* staging;
    Crew* crew;
  };

  // The result and the parts of `cut`, whose join it takes. `done` is called once, unless Abandon
  // is.
  Gather(const Helpers& helpers, WorkCut* cut, TaskDone done);

  // What part number `part` is to be submitted with.
  TaskDone Part(size_t part);
  // The part was accepted. Withdraws it at once when the request has failed meanwhile.
  void Accepted(TaskHandle handle);
  // A part was refused, and with it the request: withdraws the others and never answers.
  void Abandon();
  // Withdraws every part that has not started.
  void Cancel();

 private:
  // Gives a part's rows to the join; allocates the result with the first.
  absl::Status Take(size_t part, Payload rows);
  void OnPart(size_t part, absl::Status status, const ExecutionReport& report);
  // What ran, of all parts: longest times, largest batch, every device and kernel.
  ExecutionReport Merged() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Helpers helpers_;
  const int64_t bytes_;
  const std::unique_ptr<Join> join_;
  Mutex mu_;
  TaskDone done_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);  // of the first part that failed
  bool withdrawn_ ABSL_GUARDED_BY(mu_) = false;
  size_t missing_ ABSL_GUARDED_BY(mu_);
  Payload result_ ABSL_GUARDED_BY(mu_);
  std::vector<ExecutionReport> reports_ ABSL_GUARDED_BY(mu_);
  std::vector<TaskHandle> handles_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::engine
