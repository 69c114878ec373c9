// Gather: one request whose columns several devices compute; puts their answers together.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/base/mutex.h"
#include "server/engine/engine.h"

namespace awqd {

// Thread-safe. Each part's answer is copied on the thread that brings it, so that devices copy side
// by side; the last part to end answers the request.
class Gather : public std::enable_shared_from_this<Gather> {
 public:
  // A result of `rows` rows of `row_bytes`, from `parts` parts. `staging`, where it is put
  // together, outlives the parts. `done` is called once, unless Abandon is.
  Gather(StagingPool* staging, int64_t rows, int64_t row_bytes, size_t parts, TaskDone done);

  // What part `part` is to be submitted with: its answer, of `width` bytes a row, belongs at byte
  // `offset` of each row.
  TaskDone Part(size_t part, int64_t offset, int64_t width);
  // The part was accepted. Withdraws it at once when the request has failed meanwhile.
  void Accepted(TaskHandle handle);
  // A part was refused, and with it the request: withdraws the others and never answers.
  void Abandon();
  // Withdraws every part that has not started.
  void Cancel();

 private:
  // Copies a part's rows to their place; allocates the result with the first.
  absl::Status Place(const Payload& from, int64_t offset, int64_t width);
  void OnPart(size_t part, absl::Status status, const ExecutionReport& report);
  // What ran, of all parts: longest times, largest batch, every device and kernel.
  ExecutionReport Merged() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  StagingPool* const staging_;
  const int64_t rows_;
  const int64_t row_bytes_;
  Mutex mu_;
  TaskDone done_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);  // of the first part that failed
  bool withdrawn_ ABSL_GUARDED_BY(mu_) = false;
  size_t missing_ ABSL_GUARDED_BY(mu_);
  Payload result_ ABSL_GUARDED_BY(mu_);
  std::vector<ExecutionReport> reports_ ABSL_GUARDED_BY(mu_);
  std::vector<TaskHandle> handles_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd
