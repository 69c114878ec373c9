// LocalEngine: submit, run on a lane, complete; device faults; warm-up.
#include "server/engine/local_engine.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"
#include "server/batching/fifo_scheduler.h"
#include "server/engine/lane.h"
#include "server/engine/tasks.h"

namespace awqd {
namespace {

// Names one INTERNAL failure in the answer and in the log, so that a report can be found again.
std::string NextErrorId() {
  static std::atomic<uint32_t> count{0};
  const auto start = static_cast<uint32_t>(absl::ToUnixSeconds(absl::Now()));
  return absl::StrCat(absl::Hex(start, absl::kZeroPad8), "-", count.fetch_add(1) + 1);
}

absl::Status WithErrorId(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kInternal) return status;
  return absl::InternalError(absl::StrCat(status.message(), " [error id ", NextErrorId(), "]"));
}

class LocalEngine final : public Engine {
 public:
  LocalEngine(Device* device, const EngineOptions& options,
              std::vector<std::unique_ptr<Lane>> lanes)
      : device_(device), options_(options), lanes_(std::move(lanes)) {
    FifoOptions fifo;
    fifo.workers = static_cast<int>(lanes_.size());
    fifo.max_queued_tasks = options.max_queued_requests;
    fifo.max_queued_bytes = options.max_queued_bytes;
    scheduler_ = std::make_unique<FifoScheduler>(
        fifo, [this](int worker, std::vector<std::unique_ptr<Task>> batch) {
          Execute(*lanes_[worker], std::move(batch));
        });
  }

  absl::StatusOr<TaskHandle> Submit(MatmulWork work, const SubmitOptions& options,
                                    TaskDone done) override {
    return Schedule(std::make_unique<MatmulTask>(std::move(work), std::move(done)), options);
  }

  absl::StatusOr<TaskHandle> Submit(DequantizeWork work, const SubmitOptions& options,
                                    TaskDone done) override {
    return Schedule(std::make_unique<DequantizeTask>(std::move(work), std::move(done)), options);
  }

  absl::StatusOr<std::shared_ptr<const DeviceWeight>> Prepare(
      const CanonicalWeight& weight) override {
    return PrepareWeight(weight, *device_);
  }

  absl::Status WarmUp(const std::shared_ptr<const DeviceWeight>& weight) override;

  void Drain() override { scheduler_->Drain(); }
  const Device& device() const override { return *device_; }
  int64_t token_threshold() const override { return options_.token_threshold; }
  int64_t queued_tasks() const override { return scheduler_->queued_tasks(); }

 private:
  absl::StatusOr<TaskHandle> Schedule(std::unique_ptr<Task> task, const SubmitOptions& options);
  void Execute(Lane& lane, std::vector<std::unique_ptr<Task>> batch);
  void CheckDevice(const absl::Status& status);
  absl::Status RunAndWait(MatmulWork work);

  Device* const device_;
  const EngineOptions options_;
  const std::vector<std::unique_ptr<Lane>> lanes_;
  std::atomic<bool> fault_reported_{false};
  std::unique_ptr<Scheduler> scheduler_;  // last: its threads use everything above
};

absl::StatusOr<TaskHandle> LocalEngine::Schedule(std::unique_ptr<Task> task,
                                                 const SubmitOptions& options) {
  if (!device_->healthy()) {
    return absl::FailedPreconditionError(
        absl::StrCat("device ", device_->info().id, " has failed; the server is going away"));
  }
  task->priority = options.priority;
  task->deadline = options.deadline;
  CancelFlag flag = task->cancel_flag();
  AWQD_RETURN_IF_ERROR(scheduler_->Schedule(&task));
  return TaskHandle([flag = std::move(flag)] { flag->store(true, std::memory_order_release); });
}

void LocalEngine::Execute(Lane& lane, std::vector<std::unique_ptr<Task>> batch) {
  const TokenPolicy policy{options_.token_threshold};
  for (std::unique_ptr<Task>& queued : batch) {
    auto& task = static_cast<EngineTask&>(*queued);
    const absl::Time start = absl::Now();
    std::string out;
    const KernelRow* ran = nullptr;
    const absl::Status status = WithErrorId(task.Run(lane, policy, &out, &ran));
    ExecutionReport report;
    report.device = device_->info().id;
    report.batch_tokens = task.tokens();
    report.batch_requests = 1;
    report.queue_us = absl::ToInt64Microseconds(start - task.enqueued);
    report.compute_us = absl::ToInt64Microseconds(absl::Now() - start);
    if (ran != nullptr) {
      report.kernel = std::string(ran->name);
      report.path = ran->op == Op::kDequantize ? Path::kDequantize : ran->path;
    }
    task.Complete(status, std::move(out), report);
    CheckDevice(status);
  }
}

void LocalEngine::CheckDevice(const absl::Status& status) {
  if (device_->healthy() || fault_reported_.exchange(true)) return;
  if (options_.on_device_fault) options_.on_device_fault(status);
}

absl::Status LocalEngine::RunAndWait(MatmulWork work) {
  // Shared with the callback, which may still be returning when the waiter goes on.
  auto answered = std::make_shared<std::promise<absl::Status>>();
  std::future<absl::Status> answer = answered->get_future();
  AWQD_RETURN_IF_ERROR(Submit(std::move(work), SubmitOptions(),
                              [answered](const absl::Status& status, std::string,
                                         const ExecutionReport&) { answered->set_value(status); })
                           .status());
  return answer.get();
}

absl::Status LocalEngine::WarmUp(const std::shared_ptr<const DeviceWeight>& weight) {
  // The CPU has no modules, handles or pinned buffers to bring up: one token shows that the plan
  // runs.
  const int64_t most = device_->host_addressable() ? 1 : std::max<int64_t>(512, token_threshold());
  for (const PlanEntry& entry : weight->plan.matmul) {
    if (entry.min_m > most) continue;
    const int64_t end = entry.max_m < 0 ? most : std::min(entry.max_m, most);
    for (int64_t tokens : std::set<int64_t>{std::max<int64_t>(1, entry.min_m), end}) {
      MatmulWork work;
      work.weight = weight;
      work.tokens = tokens;
      work.path = entry.path;
      work.x.assign(tokens * weight->shape.k * SizeOf(work.x_dtype), '\0');
      AWQD_RETURN_IF_ERROR(RunAndWait(std::move(work)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> MakeLocalEngine(Device* device,
                                                        const EngineOptions& options) {
  const int wanted = options.lanes > 0 ? options.lanes : device->host_addressable() ? 1 : 2;
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int i = 0; i < wanted; ++i) {
    AWQD_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, Lane::Create(device));
    lanes.push_back(std::move(lane));
  }
  return std::unique_ptr<Engine>(std::make_unique<LocalEngine>(device, options, std::move(lanes)));
}

}  // namespace awqd
