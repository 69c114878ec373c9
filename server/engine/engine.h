// Engine: turns requests on host memory into kernel runs on devices, through a scheduler for each.
//
// Services see only this header and the works: they fill a work, submit it, and are called back
// exactly once on a worker thread, or within RunQueued. Nothing here names gRPC or an operation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/device.h"
#include "kernels/weight.h"
#include "server/batching/batch_queue.h"
#include "server/engine/staging.h"
#include "server/engine/threshold_table.h"
#include "server/engine/work.h"
#include "server/model/placed_weight.h"
#include "server/obs/snapshot.h"

namespace awqd::engine {

// Status payload holding an error id: requests that fail together (one batch, one fault) carry the
// same one. Optional; without it each request is given an id of its own.
inline constexpr absl::string_view kErrorIdPayload = "awqd.error_id";

struct SubmitOptions {
  int priority = 0;
  absl::Time deadline = absl::InfiniteFuture();
  absl::Duration to_send;  // batching::Task::to_send
  // The calling thread promises to call RunQueued soon. No other thread is woken for short work.
  // Without effect where callers_run() is false.
  bool caller_runs = false;
  // The traced call that the work is for; none otherwise.
  obs::SpanRef call;
};

// Lets a caller withdraw the work that it submitted. A work that has not started never runs then,
// and is answered CANCELLED. Copyable; may outlive the work and the engine.
class TaskHandle {
 public:
  TaskHandle() = default;
  explicit TaskHandle(std::function<void()> cancel) : cancel_(std::move(cancel)) {}
  void Cancel() const {
    if (cancel_) cancel_();
  }

 private:
  std::function<void()> cancel_;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Never blocks. On OK `*work` is taken and `done` will be called exactly once, possibly before
  // Submit returns; otherwise never, and `*work` can be submitted elsewhere, unless it had to be
  // partitioned. RESOURCE_EXHAUSTED queue full, UNAVAILABLE draining, FAILED_PRECONDITION device
  // faulted, UNIMPLEMENTED the operation cannot be partitioned as its weights are.
  virtual absl::StatusOr<TaskHandle> Submit(std::unique_ptr<Work>* work,
                                            const SubmitOptions& options, TaskDone done) = 0;
  // For a caller that has no other engine to try.
  absl::StatusOr<TaskHandle> Submit(std::unique_ptr<Work> work, const SubmitOptions& options,
                                    TaskDone done) {
    return Submit(&work, options, std::move(done));
  }

  // For a request of which only the deadline is known yet. RESOURCE_EXHAUSTED: every device has so
  // much to do that any request with this deadline would be refused.
  virtual absl::Status CheckArrival(absl::Time /*deadline*/) { return absl::OkStatus(); }

  // A result was sent before its deadline, or not. Where many are not, works are expired earlier.
  virtual void RecordAnswer(bool /*in_time*/) {}

  // Called by a thread that submitted with `caller_runs`, once it has nothing more to submit. Runs
  // the next batch on the calling thread, if it is short: about a millisecond at most. Its answers
  // are given before this returns. True: more is left for this thread, which does its other duties
  // and calls again. False: nothing is left for it.
  virtual bool RunQueued() { return false; }
  // Whether RunQueued ever runs anything. Does not change.
  virtual bool callers_run() const { return false; }

  // Puts an inline weight of a stateless call on one of the engine's devices, on `device` unless
  // that is null; freed with the last reference. Blocks for the packing, so callers bound its size
  // first.
  virtual absl::StatusOr<std::shared_ptr<const model::PlacedWeight>> Prepare(
      const HostWeight& weight, const Device* device) = 0;
  absl::StatusOr<std::shared_ptr<const model::PlacedWeight>> Prepare(const HostWeight& weight) {
    return Prepare(weight, nullptr);
  }

  // Runs the weight's kernels once for the token counts that users send first, so that no request
  // waits while modules, handles and buffers are created. Blocks until done; called before a model
  // is shown ready.
  virtual absl::Status WarmUp(const std::shared_ptr<const model::PlacedWeight>& /*weight*/) {
    return absl::OkStatus();
  }

  // From now on no request waits for others to merge with. Called at shutdown, while calls in
  // progress still submit work.
  virtual void Hurry() {}

  // The pool for payloads of requests before Submit. Every device of this engine reads its memory.
  virtual StagingPool& staging() = 0;

  // Frees host memory that is kept for requests to come and is not in use, except some buffers that
  // are slow to make. Never waits for work in progress. Called on an idle server; the next requests
  // may allocate again.
  virtual void FreeKeptMemory() { staging().FreeKept(); }

  // Refuses new work and returns when all accepted work was answered.
  virtual void Drain() = 0;

  virtual const Device& device() const = 0;
  // Every device that work may run on; device() is the first.
  virtual std::vector<const Device*> devices() const { return {&device()}; }
  // The number of merged tokens from which a weight is dequantised first; -1: measured for each
  // shape.
  virtual int64_t token_threshold() const = 0;
  // The count in force for this weight.
  virtual int64_t TokenThreshold(const DeviceWeight& /*weight*/) const { return token_threshold(); }
  virtual int64_t queued_tasks() const = 0;
  // The statistics of each device, in the order of devices().
  // `weights_bytes` and `gpu` are not known here.
  virtual std::vector<obs::DeviceStats> stats() const { return {}; }
};

struct EngineOptions {
  // Fewer merged tokens: fused kernel; this many and more: dequantise, then a dense product.
  // A count, ThresholdTable::kByKernel or kAuto.
  int64_t token_threshold = ThresholdTable::kByKernel;
  batching::BatchOptions batching;
  // Streams with a worker thread each. 0: one on the CPU, whose kernels use all cores; two on a
  // GPU, so that the copies of one batch overlap the kernels of another.
  int lanes = 0;
  // Threads that help lanes to answer large batches. -1: a quarter of the cores, at most four, on a
  // GPU; none on the CPU, whose kernels use the cores.
  int answer_threads = -1;
  // Host memory for payloads and results that is kept for reuse between requests.
  int64_t staging_bytes = int64_t{512} << 20;
  // Called once, on a worker thread, when the device reports a sticky error and nothing on it
  // can be served any more.
  std::function<void(const absl::Status&)> on_device_fault;
};

// Makes the engine of one device: a scheduler, and a lane for each of its workers. `device` outlives
// the engine.
absl::StatusOr<std::unique_ptr<Engine>> MakeLocalEngine(Device* device,
                                                        const EngineOptions& options);

// Makes the engine of several devices: a request runs on one that holds its weight, or on all that
// hold parts of it.
//
// `engines`: one or more, each over its own device.
//
// A weight that several devices hold whole: a request runs on the one of those that work with the
// fewest tokens queued and running (a Dequantize counts its rows); devices with equal load take
// turns; if one refuses, the next.
// A weight that is partitioned (tensor parallel), or a stack that is expert parallel: a request is
// one task on each device that holds columns, rows or experts it wants. Nothing on a device ever
// waits for another, so that no order of requests can block; the last part to end answers. A part
// that fails, expires or is refused withdraws the others, and its status is the request's. A work
// without weights runs on any device, chosen as among those that hold a weight whole. Inline
// weights go to the device that works with the fewest tokens; among equals, to the one with most
// free memory. A device that has failed fails what it has, and is given nothing more; the others go
// on.
std::unique_ptr<Engine> MakeRoutingEngine(std::vector<std::unique_ptr<Engine>> engines);

}  // namespace awqd::engine
