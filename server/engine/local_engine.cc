// LocalEngine: submit, run batches on lanes, complete; device faults; warm-up.
#include "server/engine/local_engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/batching/batch_scheduler.h"
#include "server/batching/policy.h"
#include "server/engine/crew.h"
#include "server/engine/lane.h"
#include "server/engine/tasks.h"

namespace awqd {
namespace {

// Names one INTERNAL failure in the answers and in the log, so that a report can be found again.
std::string NextErrorId() {
  static std::atomic<uint32_t> count{0};
  const auto start = static_cast<uint32_t>(absl::ToUnixSeconds(absl::Now()));
  return absl::StrCat(absl::Hex(start, absl::kZeroPad8), "-", count.fetch_add(1) + 1);
}

absl::Status WithErrorId(absl::Status status) {
  if (status.code() == absl::StatusCode::kInternal) {
    status.SetPayload(kErrorIdPayload, absl::Cord(NextErrorId()));
  }
  return status;
}

// Multiplications of a batch that a thread with other duties may run, about a millisecond of two
// cores: 56 tokens on a weight of 384 x 1536, two on one of 4096 x 4096. Below it, waking a worker
// and being woken by its answers costs a large part of the product; parsing a request of a megabyte
// keeps such a thread as long.
constexpr int64_t kShortBatch = int64_t{1} << 25;

// Answers that a thread gives in a row before another is worth waking: each is put into bytes and
// written to its socket, some 10 us.
constexpr int64_t kAnswersEach = 8;

int AnswerThreads(const Device& device, int wanted) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return wanted >= 0 ? wanted : device.host_addressable() ? 0 : std::min(4, cores / 4);
}

// A worker's lane. The lock is the worker's own but for warm-up, which runs on every lane in turn.
struct LaneSlot {
  Mutex mu;
  std::unique_ptr<Lane> lane ABSL_GUARDED_BY(mu);
};

class LocalEngine final : public Engine {
 public:
  LocalEngine(Device* device, const EngineOptions& options, std::unique_ptr<StagingPool> staging,
              std::vector<std::unique_ptr<LaneSlot>> lanes)
      : device_(device),
        options_(options),
        thresholds_(options.token_threshold, device),
        staging_(std::move(staging)),
        lanes_(std::move(lanes)),
        crew_(AnswerThreads(*device, options.answer_threads)) {
    scheduler_ = std::make_unique<BatchScheduler>(options.batching, static_cast<int>(lanes_.size()),
                                                  [this](int worker, Batch batch) {
                                                    MutexLock lock(&lanes_[worker]->mu);
                                                    Execute(*lanes_[worker]->lane, batch);
                                                  });
  }

  // A handle may keep the scheduler alive a moment longer; its threads must not outlive the lanes.
  ~LocalEngine() override { scheduler_->Drain(); }

  absl::StatusOr<TaskHandle> Submit(MatmulWork work, const SubmitOptions& options,
                                    TaskDone done) override {
    return Schedule(std::make_unique<MatmulTask>(std::move(work), std::move(done)), options);
  }
  absl::StatusOr<TaskHandle> Submit(DequantizeWork work, const SubmitOptions& options,
                                    TaskDone done) override {
    return Schedule(std::make_unique<DequantizeTask>(std::move(work), std::move(done)), options);
  }
  bool RunQueued() override { return callers_run() && scheduler_->RunQueued(CallersShare()); }
  bool callers_run() const override { return device_->host_addressable(); }
  absl::StatusOr<std::shared_ptr<const PlacedWeight>> Prepare(
      const CanonicalWeight& weight) override {
    AWQD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceWeight> here,
                          PrepareWeight(weight, *device_));
    return Whole(std::move(here));
  }
  absl::Status WarmUp(const std::shared_ptr<const PlacedWeight>& weight) override;

  StagingPool& staging() override { return *staging_; }
  void FreeKeptMemory() override;
  void Hurry() override { scheduler_->Hurry(); }
  void Drain() override { scheduler_->Drain(); }
  const Device& device() const override { return *device_; }
  int64_t token_threshold() const override { return options_.token_threshold; }
  int64_t TokenThreshold(const DeviceWeight& weight) const override {
    return thresholds_.For(weight);
  }
  int64_t queued_tasks() const override { return scheduler_->queued_tasks(); }

 private:
  // What a batch may cost that a caller of RunQueued runs; -1: none may. Nothing while warm-up
  // holds lanes for long, because such a caller must not wait for one.
  int64_t CallersShare() const;
  absl::StatusOr<TaskHandle> Schedule(std::unique_ptr<Task> task, const SubmitOptions& options);
  void Execute(Lane& lane, Batch& batch);
  absl::Status Run(Lane& lane, const Batch& batch, Payload* results, const KernelRow** ran);
  absl::Status RunMatmul(Lane& lane, const Batch& batch, char* y, const KernelRow** ran);
  ExecutionReport Report(const Batch& batch, const KernelRow* ran, absl::Duration compute) const;
  void CheckDevice(const absl::Status& status);
  absl::Status RunOnEveryLane(const MatmulWork& work, Path path);

  Device* const device_;
  const EngineOptions options_;
  ThresholdTable thresholds_;
  const std::unique_ptr<StagingPool> staging_;
  const std::vector<std::unique_ptr<LaneSlot>> lanes_;
  Crew crew_;  // answers large batches
  std::atomic<bool> fault_reported_{false};
  // Warm-ups in progress.
  std::atomic<int> warming_up_{0};
  // Shared with the handles, which may outlive the engine.
  std::shared_ptr<Scheduler> scheduler_;
};

int64_t LocalEngine::CallersShare() const {
  return callers_run() && warming_up_.load() == 0 ? kShortBatch : -1;
}

absl::StatusOr<TaskHandle> LocalEngine::Schedule(std::unique_ptr<Task> task,
                                                 const SubmitOptions& options) {
  if (!device_->healthy()) {
    return absl::FailedPreconditionError(
        absl::StrCat("device ", device_->info().id, " has failed; the server is going away"));
  }
  task->priority = options.priority;
  task->deadline = options.deadline;
  const bool callers = options.caller_runs && task->cost() <= CallersShare();
  AWQD_ASSIGN_OR_RETURN(const Ticket ticket,
                        scheduler_->Schedule(&task, callers ? Runner::kCaller : Runner::kWorker));
  return TaskHandle([scheduler = std::weak_ptr<Scheduler>(scheduler_), ticket] {
    if (auto alive = scheduler.lock()) alive->Cancel(ticket);
  });
}

void LocalEngine::Execute(Lane& lane, Batch& batch) {
  const absl::Time start = absl::Now();
  const KernelRow* ran = nullptr;
  Payload results;  // of the whole batch, in the tasks' order
  const absl::Status status = WithErrorId(Run(lane, batch, &results, &ran));
  const ExecutionReport report = Report(batch, ran, absl::Now() - start);
  std::vector<Payload> parts(batch.tasks.size());
  int64_t next = 0;
  for (size_t i = 0; status.ok() && i < parts.size(); ++i) {
    const int64_t bytes = static_cast<const EngineTask&>(*batch.tasks[i]).result_bytes();
    parts[i] = results.Slice(next, bytes);
    next += bytes;
  }
  results = Payload();  // the answers own it from here on
  crew_.Share(static_cast<int64_t>(parts.size()), kAnswersEach, [&](int64_t i) {
    auto& task = static_cast<EngineTask&>(*batch.tasks[i]);
    ExecutionReport mine = report;
    mine.queue_us = absl::ToInt64Microseconds(start - task.enqueued);
    task.Complete(status, std::move(parts[i]), mine);
    batch.tasks[i].reset();
  });
  CheckDevice(status);
}

ExecutionReport LocalEngine::Report(const Batch& batch, const KernelRow* ran,
                                    absl::Duration compute) const {
  ExecutionReport report;
  report.device = device_->info().id;
  report.batch_tokens = batch.tokens;
  report.batch_requests = static_cast<int32_t>(batch.tasks.size());
  report.compute_us = absl::ToInt64Microseconds(compute);
  if (ran != nullptr) {
    report.kernel = std::string(ran->name);
    report.path = ran->op == Op::kDequantize ? Path::kDequantize : ran->path;
  }
  return report;
}

absl::Status LocalEngine::Run(Lane& lane, const Batch& batch, Payload* results,
                              const KernelRow** ran) {
  int64_t bytes = 0;
  for (const std::unique_ptr<Task>& task : batch.tasks) {
    bytes += static_cast<const EngineTask&>(*task).result_bytes();
  }
  AWQD_ASSIGN_OR_RETURN(*results, staging_->Get(bytes));
  // Dequantize tasks never merge, so that one in a batch is alone in it.
  if (auto* dequantize = dynamic_cast<const DequantizeTask*>(batch.tasks.front().get())) {
    return lane.Dequantize(dequantize->work(), results->data(), ran);
  }
  return RunMatmul(lane, batch, results->data(), ran);
}

absl::Status LocalEngine::RunMatmul(Lane& lane, const Batch& batch, char* y,
                                    const KernelRow** ran) {
  const MatmulWork& work = static_cast<const MatmulTask&>(*batch.tasks.front()).work();
  const TokenPolicy policy{thresholds_.For(work.here())};
  const Path path =
      work.path.value_or(policy.UseFused(batch.tokens) ? Path::kFused : Path::kDequantize);
  std::vector<RowPiece> pieces;
  pieces.reserve(batch.tasks.size());
  for (const std::unique_ptr<Task>& queued : batch.tasks) {
    const auto& task = static_cast<const MatmulTask&>(*queued);
    pieces.push_back({task.work().x.data(), task.tokens()});
  }
  const int64_t step = std::max<int64_t>(1, options_.batching.max_batch_tokens);
  if (pieces.size() > 1 || batch.tokens <= step) return lane.Matmul(work, pieces, path, y, ran);
  // One task larger than a batch may be: in steps, so that the lane's buffers stay bounded.
  const int64_t x_row = work.here().shape.k * SizeOf(work.x_dtype);
  const int64_t y_row = work.here().shape.n * SizeOf(work.out_dtype);
  for (int64_t row = 0; row < batch.tokens; row += step) {
    const RowPiece piece{pieces[0].x + row * x_row, std::min(step, batch.tokens - row)};
    AWQD_RETURN_IF_ERROR(lane.Matmul(work, {&piece, 1}, path, y + row * y_row, ran));
  }
  return absl::OkStatus();
}

void LocalEngine::CheckDevice(const absl::Status& status) {
  if (device_->healthy() || fault_reported_.exchange(true)) return;
  if (options_.on_device_fault) options_.on_device_fault(status);
}

absl::Status LocalEngine::RunOnEveryLane(const MatmulWork& work, Path path) {
  const int64_t y_bytes = work.tokens * work.here().shape.n * SizeOf(work.out_dtype);
  AWQD_ASSIGN_OR_RETURN(const Payload y, staging_->Get(y_bytes));
  // Token by token, so that the buffer in which small requests are gathered comes up as well.
  const int64_t x_row = work.here().shape.k * SizeOf(work.x_dtype);
  std::vector<RowPiece> pieces;
  for (int64_t row = 0; row < work.tokens; ++row) {
    pieces.push_back({work.x.data() + row * x_row, 1});
  }
  for (const std::unique_ptr<LaneSlot>& slot : lanes_) {
    const KernelRow* ran = nullptr;
    MutexLock lock(&slot->mu);
    AWQD_RETURN_IF_ERROR(slot->lane->Matmul(work, pieces, path, y.data(), &ran));
  }
  return absl::OkStatus();
}

void LocalEngine::FreeKeptMemory() {
  // Making pinned memory takes the driver longer than a small request takes, so that the buffers of
  // a burst of those stay. Lanes' own pinned memory was sized by warm-up and stays as well.
  constexpr int64_t kRestPinned = int64_t{32} << 20;
  staging_->FreeKept(device_->host_addressable() ? 0 : kRestPinned);
  for (const std::unique_ptr<LaneSlot>& slot : lanes_) {
    if (!slot->mu.TryLock()) continue;  // at work, so not idle after all
    slot->lane->FreeHostBuffers();
    slot->mu.Unlock();
  }
}

absl::Status LocalEngine::WarmUp(const std::shared_ptr<const PlacedWeight>& weight) {
  ++warming_up_;
  const absl::Cleanup done = [this] { --warming_up_; };
  const DeviceWeight& here = *weight->parts.front().weight;
  AWQD_RETURN_IF_ERROR(thresholds_.Measure(here));
  // On a GPU the largest batch brings every buffer to its final size. The CPU has no modules,
  // handles or pinned buffers to bring up: one token shows that the plan runs.
  const int64_t most = device_->host_addressable() ? 1 : options_.batching.max_batch_tokens;
  for (const PlanEntry& entry : here.plan.matmul) {
    if (entry.min_m > most) continue;
    const int64_t end = entry.max_m < 0 ? most : std::min(entry.max_m, most);
    for (int64_t tokens : std::set<int64_t>{std::max<int64_t>(1, entry.min_m), end}) {
      MatmulWork work;
      work.weight = weight;
      work.tokens = tokens;
      AWQD_ASSIGN_OR_RETURN(work.x, staging_->Get(tokens * weight->shape.k * SizeOf(work.x_dtype)));
      std::memset(work.x.data(), 0, work.x.size());
      AWQD_RETURN_IF_ERROR(RunOnEveryLane(work, entry.path));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> MakeLocalEngine(Device* device,
                                                        const EngineOptions& options) {
  const int wanted = options.lanes > 0 ? options.lanes : device->host_addressable() ? 1 : 2;
  auto staging = std::make_unique<StagingPool>(device, options.staging_bytes);
  std::vector<std::unique_ptr<LaneSlot>> lanes;
  for (int i = 0; i < wanted; ++i) {
    AWQD_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, Lane::Create(device, staging.get()));
    lanes.push_back(std::make_unique<LaneSlot>());
    MutexLock lock(&lanes.back()->mu);
    lanes.back()->lane = std::move(lane);
  }
  return std::unique_ptr<Engine>(
      std::make_unique<LocalEngine>(device, options, std::move(staging), std::move(lanes)));
}

}  // namespace awqd
