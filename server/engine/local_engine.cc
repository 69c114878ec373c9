// LocalEngine: submit, run batches on lanes, complete; device faults; warm-up.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <new>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/batching/batch_scheduler.h"
#include "server/engine/engine.h"
#include "server/engine/lane.h"
#include "server/engine/matmul_work.h"
#include "server/engine/statistics.h"
#include "server/engine/thread_pool.h"

namespace awqd::engine {
namespace {

// Names an INTERNAL failure in the answers and in the log, so that a report can be found again.
absl::Status WithErrorId(absl::Status status) {
  static std::atomic<uint32_t> count{0};
  if (!absl::IsInternal(status)) return status;
  const auto now = static_cast<uint32_t>(absl::ToUnixSeconds(absl::Now()));
  const std::string id = absl::StrCat(absl::Hex(now, absl::kZeroPad8), "-", count.fetch_add(1) + 1);
  status.SetPayload(kErrorIdPayload, absl::Cord(id));
  return status;
}

// Multiplications of a batch that a thread with other duties may run, about a millisecond of two
// cores: 56 tokens on a weight of 384 x 1536, two on one of 4096 x 4096. Below it, waking a worker
// and being woken by its answers costs a large part of the product; parsing a request of a megabyte
// keeps such a thread as long.
constexpr int64_t kShortBatch = int64_t{1} << 25;
// The same of a GPU, for a work that is alone: 390 tokens on a gated MLP of 4096 x 14336, of which 256
// take an H200 197 us. A work that was seen to take over a millisecond is a worker's (RunQueued).
// Calls that arrive meanwhile would wait for the GPU in a queue, too. With company a worker runs it,
// so that this thread receives what can be merged.
constexpr int64_t kShortBatchOfGpu = int64_t{1} << 36;

// Answers that a thread gives in a row before another is worth waking: each is put into bytes and
// written to its socket, some 10 us.
constexpr int64_t kAnswersEach = 8;

int CountAnswerThreads(const Device& device, int wanted) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return wanted >= 0 ? wanted : device.host_addressable() ? 0 : std::min(4, cores / 4);
}

Work& AsWork(const std::unique_ptr<batching::Task>& task) { return static_cast<Work&>(*task); }

// For ExecutionReport::batch_calls. Without a traced call it only reads one field of each task.
obs::SpanRefs CollectTracedCalls(const batching::Batch& batch) {
  if (batch.tasks.size() < 2) return nullptr;
  std::vector<obs::SpanRef> calls;
  for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
    const obs::SpanRef& call = AsWork(task).call;
    if (!call || absl::c_linear_search(calls, call)) continue;
    calls.push_back(call);
    if (calls.size() > obs::kMaxLinks) break;
  }
  if (calls.size() < 2) return nullptr;
  return std::make_shared<const std::vector<obs::SpanRef>>(std::move(calls));
}

// One token a work, so that the buffer in which small requests are gathered comes up as well.
absl::StatusOr<batching::Batch> MakeZeroBatch(
    const std::shared_ptr<const model::PlacedWeight>& weight, int64_t tokens, Path path,
    StagingPool& staging) {
  MatmulWork work;
  work.weight = weight;
  work.rows = 1;
  work.path = path;
  const int64_t row_bytes = weight->shape.k * SizeOf(work.x_dtype);
  AWQD_ASSIGN_OR_RETURN(const Payload x, staging.Get(tokens * row_bytes));
  std::memset(x.data(), 0, x.size());
  batching::Batch batch = {.tokens = tokens};
  for (int64_t token = 0; token < tokens; ++token) {
    work.x = x.Slice(token * row_bytes, row_bytes);
    batch.tasks.push_back(std::make_unique<MatmulWork>(work));
  }
  return batch;
}

// Those works of a batch whose results go to memory of devices. `results`: of the whole batch.
std::vector<DeviceOutput> OutputsOf(const batching::Batch& batch, char* results) {
  std::vector<DeviceOutput> out;
  for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
    const Work& work = AsWork(task);
    if (work.output.device() != nullptr) out.push_back({results, work.output});
    results += work.result_bytes();
  }
  return out;
}

absl::Status WaitUntilReady(const Lane& lane, const batching::Batch& batch) {
  for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
    const Work& work = AsWork(task);
    if (work.ready != nullptr) AWQD_RETURN_IF_ERROR(work.ready->Wait(lane.stream()));
    if (work.waits_for != nullptr && work.waits_for->event != nullptr) {
      AWQD_RETURN_IF_ERROR(work.waits_for->event->Wait(lane.stream()));
    }
  }
  return absl::OkStatus();
}

absl::Status RecordFinished(const Lane& lane, const batching::Batch& batch) {
  for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
    const Work& work = AsWork(task);
    if (work.finished != nullptr) AWQD_RETURN_IF_ERROR(work.finished->Record(lane.stream()));
    if (work.marks != nullptr && work.marks->event != nullptr) {
      AWQD_RETURN_IF_ERROR(work.marks->event->Record(lane.stream()));
    }
  }
  return absl::OkStatus();
}

// Early batches of a lane that the GPU may have before it.
constexpr size_t kMostEarly = 8;

// Whether all of the batch may be answered once it is enqueued. Those of its works that mark a point
// get an event for it then.
bool IsEarly(Lane& lane, const batching::Batch& batch) {
  for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
    const Work& work = AsWork(task);
    if (!work.early || work.output.device() == nullptr) return false;
  }
  for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
    StreamPoint* const point = AsWork(task).marks.get();
    if (point == nullptr) continue;
    point->event = lane.MakeEvent();
    if (point->event == nullptr) return false;
  }
  return true;
}

// Cancels a queued work; the function of a TaskHandle.
struct CancelQueued {
  std::weak_ptr<batching::BatchScheduler> scheduler;
  batching::Ticket ticket = 0;

  void operator()() const {
    if (const auto alive = scheduler.lock()) alive->Cancel(ticket);
  }
};

// A worker's lane. The lock is the worker's own but for warm-up, which runs on every lane in turn.
struct LaneSlot {
  Mutex mu;
  std::unique_ptr<Lane> lane ABSL_GUARDED_BY(mu);
};

class LocalEngine final : public Engine {
 public:
  LocalEngine(Device* device, const EngineOptions& options)
      : device_(device),
        options_(options),
        staging_(device, options.staging_bytes),
        thresholds_(options.token_threshold, device),
        pool_(CountAnswerThreads(*device, options.answer_threads)) {}

  // Once, before all else.
  absl::Status Start() {
    const int wanted = options_.lanes > 0 ? options_.lanes : device_->host_addressable() ? 1 : 2;
    const LaneOptions lane_options = {
        .device = device_,
        .staging = &staging_,
        .thresholds = &thresholds_,
        .max_rows = std::max<int64_t>(1, options_.batching.max_batch_tokens)};
    for (int i = 0; i < wanted; ++i) {
      AWQD_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, Lane::Create(lane_options));
      lanes_.push_back(std::make_unique<LaneSlot>());
      MutexLock lock(&lanes_.back()->mu);
      lanes_.back()->lane = std::move(lane);
    }
    scheduler_ = std::make_shared<batching::BatchScheduler>(
        options_.batching, wanted, [this](int worker, batching::Batch batch) {
          MutexLock lock(&lanes_[worker]->mu);
          Execute(*lanes_[worker]->lane, batch);
        });
    return absl::OkStatus();
  }

  // A handle may keep the scheduler alive a moment longer; its threads must not outlive the lanes.
  ~LocalEngine() override {
    if (scheduler_ != nullptr) scheduler_->Drain();
  }

  using Engine::Submit;

  // noexcept: once a work is queued its caller must hear of it.
  absl::StatusOr<TaskHandle> Submit(std::unique_ptr<Work>* work, const SubmitOptions& options,
                                    TaskDone done) noexcept override {
    if (!device_->healthy()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "device ", device_->info().id,
          " has failed; loading the model again puts it on the devices that are left"));
    }
    Work& queued = **work;
    queued.priority = options.priority;
    queued.deadline = options.deadline;
    queued.to_send = options.to_send;
    queued.done = std::move(done);
    queued.call = options.call;
    const bool callers = options.caller_runs && queued.cost() <= MaxCallerCost();
    std::unique_ptr<batching::Task> task;
    absl::Status status;
    try {
      // Made before the work is queued, as it needs memory.
      std::function<void()> cancel = CancelQueued{scheduler_};
      task = std::move(*work);
      const absl::StatusOr<batching::Ticket> ticket = scheduler_->Schedule(
          &task, callers ? batching::Runner::kCaller : batching::Runner::kWorker);
      if (ticket.ok()) {
        cancel.target<CancelQueued>()->ticket = *ticket;
        return TaskHandle(std::move(cancel));
      }
      status = ticket.status();
    } catch (const std::bad_alloc&) {
      status = OutOfMemory("the server has no memory to queue this request");
    }
    if (task != nullptr) work->reset(static_cast<Work*>(task.release()));
    return status;
  }

  absl::Status CheckArrival(absl::Time deadline) override {
    return scheduler_->CheckArrival(deadline);
  }
  void RecordAnswer(bool in_time) override { scheduler_->RecordAnswer(in_time); }
  bool RunQueued() override {
    return scheduler_->RunQueued(MaxCallerCost(), /*alone=*/!device_->host_addressable());
  }
  bool callers_run() const override { return true; }
  using Engine::Prepare;
  absl::StatusOr<std::shared_ptr<const model::PlacedWeight>> Prepare(const HostWeight& weight,
                                                                     const Device*) override {
    AWQD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceWeight> here,
                          PrepareWeight(weight, *device_));
    return model::MakeWhole(std::move(here));
  }

  // Every row of the plan, for its smallest token count and for its largest. An operation whose
  // kernels these products do not bring up adds its batches here.
  absl::Status WarmUp(const std::shared_ptr<const model::PlacedWeight>& weight) override {
    ++warming_up_;
    const absl::Cleanup done = [this] { --warming_up_; };
    AWQD_RETURN_IF_ERROR(thresholds_.MeasureThreshold(*weight->parts.front().weight));
    // On a GPU the largest batch brings every buffer to its final size. The CPU has no modules,
    // handles or pinned buffers to bring up: one token shows that the plan runs.
    const int64_t most = device_->host_addressable() ? 1 : options_.batching.max_batch_tokens;
    for (const PlanEntry& entry : weight->parts.front().weight->plan.matmul) {
      if (entry.min_m > most) continue;
      const int64_t end = entry.max_m < 0 ? most : std::min(entry.max_m, most);
      for (int64_t tokens : std::set<int64_t>{std::max<int64_t>(1, entry.min_m), end}) {
        AWQD_ASSIGN_OR_RETURN(const batching::Batch batch,
                              MakeZeroBatch(weight, tokens, entry.path, staging_));
        AWQD_RETURN_IF_ERROR(RunOnEveryLane(batch));
      }
    }
    return absl::OkStatus();
  }

  StagingPool& staging() override { return staging_; }

  void FreeKeptMemory() override {
    // Making pinned memory takes the driver longer than a small request takes, so that the buffers of
    // a burst of those stay. Lanes' own pinned memory was sized by warm-up and stays as well.
    constexpr int64_t kRestPinned = int64_t{32} << 20;
    staging_.FreeKept(device_->host_addressable() ? 0 : kRestPinned);
    for (const std::unique_ptr<LaneSlot>& slot : lanes_) {
      if (!slot->mu.TryLock()) continue;   // at work, so not idle after all
      slot->lane->Settle().IgnoreError();  // the next batch finds the fault again
      slot->lane->FreeHostBuffers();
      slot->mu.Unlock();
    }
  }

  void Hurry() override { scheduler_->Hurry(); }
  void Drain() override { scheduler_->Drain(); }
  const Device& device() const override { return *device_; }
  int64_t token_threshold() const override { return options_.token_threshold; }
  int64_t TokenThreshold(const DeviceWeight& weight) const override {
    return thresholds_.FindThreshold(weight);
  }
  int64_t queued_tasks() const override { return scheduler_->queued_tasks(); }

  std::vector<obs::DeviceStats> stats() const override {
    const DeviceInfo& info = device_->info();
    const batching::SchedulerCounts queue = scheduler_->counts();
    const StagingStats staging = staging_.stats();
    obs::DeviceStats out = {.id = info.id,
                            .name = info.name,
                            .pci_bus_id = info.pci_bus_id,
                            .healthy = device_->healthy(),
                            .memory_bytes = info.memory_bytes,
                            .free_bytes = device_->FreeBytes(),
                            .used_bytes = device_->UsedBytes(),
                            .queued_requests = queued_tasks(),
                            .queue_expired = queue.expired,
                            .queue_cancelled = queue.cancelled,
                            .queue_full = queue.refused.full,
                            .queue_draining = queue.refused_draining,
                            .queue_too_late = queue.refused.too_late,
                            .queue_too_long = queue.refused.too_long,
                            .staging_lent_bytes = staging.lent_bytes,
                            .staging_kept_bytes = staging.kept_bytes,
                            .staging_misses = staging.misses,
                            .staging_copied = staging.copied_bytes};
    statistics_.FillStats(&out);
    return {std::move(out)};
  }

 private:
  // The most that a batch may cost that a caller of RunQueued runs; -1: none may. Nothing while
  // warm-up holds lanes for long, because such a caller must not wait for one.
  int64_t MaxCallerCost() const {
    if (warming_up_.load() > 0) return -1;
    return device_->host_addressable() ? kShortBatch : kShortBatchOfGpu;
  }

  void Execute(Lane& lane, batching::Batch& batch) {
    static std::atomic<int64_t> batches{0};  // of the process
    (void)lane.ResetInputTime();             // of a warm-up
    const absl::Time start = absl::Now();
    Payload results;  // of the whole batch, in the tasks' order
    ExecutionReport report;
    const bool early = IsEarly(lane, batch);
    const absl::Status status = WithErrorId(Run(lane, batch, early, &results, &report));
    report.device = device_->info().id;
    report.batch_id = batches.fetch_add(1, std::memory_order_relaxed) + 1;
    report.batch_tokens = batch.tokens;
    report.batch_requests = static_cast<int32_t>(batch.tasks.size());
    const absl::Time computed = absl::Now();
    report.compute_us = absl::ToInt64Microseconds(computed - start);
    report.input_ns = absl::ToInt64Nanoseconds(lane.ResetInputTime());
    statistics_.RecordBatch(batch, start, status, report);
    const obs::SpanRefs calls = CollectTracedCalls(batch);
    const std::shared_ptr<model::ModelStatistics> statistics =
        StatisticsRecorder::FindModelStatistics(batch);
    std::vector<Payload> parts(batch.tasks.size());
    int64_t next = 0;
    for (size_t i = 0; status.ok() && i < parts.size(); ++i) {
      const Work& work = AsWork(batch.tasks[i]);
      parts[i] =
          work.output.device() != nullptr ? work.output : results.Slice(next, work.result_bytes());
      next += work.result_bytes();
    }
    results = Payload();  // the answers own it from here on
    pool_.ParallelFor(static_cast<int64_t>(parts.size()), kAnswersEach, [&](int64_t i) {
      Work& work = AsWork(batch.tasks[i]);
      ExecutionReport mine = report;
      mine.queue_us = absl::ToInt64Microseconds(start - work.enqueued);
      if (work.call) mine.batch_calls = calls;
      if (early && status.ok()) {
        std::exchange(work.done, nullptr)(status, std::move(parts[i]), mine);
        return;  // the GPU still uses its memory
      }
      work.Complete(status, std::move(parts[i]), mine);
      batch.tasks[i].reset();
    });
    for (std::unique_ptr<batching::Task>& task : batch.tasks) {
      if (task != nullptr) lane.Keep(std::move(task));
    }
    if (statistics != nullptr && status.ok()) {
      StatisticsRecorder::RecordAnswers(*statistics, report.batch_requests, batch.tokens,
                                        absl::Now() - computed);
    }
    if (!device_->healthy() && !fault_reported_.exchange(true) && options_.on_device_fault) {
      options_.on_device_fault(status);
    }
  }

  absl::Status Run(Lane& lane, const batching::Batch& batch, bool early, Payload* results,
                   ExecutionReport* report) {
    AWQD_RETURN_IF_ERROR(lane.Settle(kMostEarly));
    const Work& first = AsWork(batch.tasks.front());
    if (batch.tasks.size() == 1 && first.output.device() != nullptr) {
      *results = first.output;
    } else {
      int64_t bytes = 0;
      for (const std::unique_ptr<batching::Task>& task : batch.tasks) {
        bytes += AsWork(task).result_bytes();
      }
      AWQD_ASSIGN_OR_RETURN(*results, staging_.Get(bytes));
    }
    lane.SetOutputs(OutputsOf(batch, results->data()), early);
    absl::Status status = WaitUntilReady(lane, batch);
    if (status.ok()) status = first.Run(lane, batch, results->data(), report);
    if (status.ok()) status = RecordFinished(lane, batch);
    if (!status.ok()) lane.DiscardWork();
    lane.SetOutputs({});  // nothing keeps callers' memory from here on
    return status;
  }

  absl::Status RunOnEveryLane(const batching::Batch& batch) {
    absl::Time start;
    for (const std::unique_ptr<LaneSlot>& slot : lanes_) {
      MutexLock lock(&slot->mu);
      start = absl::Now();
      Payload results;
      ExecutionReport report;
      AWQD_RETURN_IF_ERROR(Run(*slot->lane, batch, /*early=*/false, &results, &report));
    }
    // The last lane's time: the first one brings modules up.
    scheduler_->RecordRun(batch.tasks.front()->run_key(), batch.tokens, absl::Now() - start);
    return absl::OkStatus();
  }

  Device* const device_;
  const EngineOptions options_;
  StagingPool staging_;
  ThresholdTable thresholds_;
  std::vector<std::unique_ptr<LaneSlot>> lanes_;
  ThreadPool pool_;  // answers large batches
  StatisticsRecorder statistics_;
  std::atomic<bool> fault_reported_{false};
  // Warm-ups in progress.
  std::atomic<int> warming_up_{0};
  // Shared with the handles, which may outlive the engine.
  std::shared_ptr<batching::BatchScheduler> scheduler_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> MakeLocalEngine(Device* device,
                                                        const EngineOptions& options) {
  auto engine = std::make_unique<LocalEngine>(device, options);
  AWQD_RETURN_IF_ERROR(engine->Start());
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace awqd::engine
