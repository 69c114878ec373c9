// BatchScheduler: the threads around a BatchQueue.
#include "server/batching/batch_scheduler.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace awqd::batching {
namespace {

constexpr int kNoLane = -1;

// The longest task that a caller of RunQueued runs because it is alone.
constexpr absl::Duration kLongestAlone = absl::Milliseconds(1);

// A thread that waits for a later moment wakes after this and waits again, so that no time
// overflows.
constexpr absl::Duration kLongestWait = absl::Minutes(1);

// A time of the injected clock as one of the clock that condition variables use.
std::chrono::steady_clock::time_point WakeAt(absl::Time moment, absl::Time now) {
  const absl::Duration wait = std::clamp(moment - now, absl::ZeroDuration(), kLongestWait);
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(wait);
}

void FailExpired(std::vector<std::unique_ptr<Task>> expired, absl::Time now) {
  for (std::unique_ptr<Task>& task : expired) {
    const std::string waited =
        absl::StrCat(" after ", absl::FormatDuration(now - task->enqueued), " in the queue");
    const absl::Duration left = task->deadline - now;
    task->Fail(absl::DeadlineExceededError(
        left <= absl::ZeroDuration()
            ? absl::StrCat("deadline passed", waited)
            : absl::StrCat("deadline cannot be met: ", absl::FormatDuration(left), " are left",
                           waited)));
  }
}

}  // namespace

BatchScheduler::BatchScheduler(const BatchOptions& options, int workers, BatchExecutor executor,
                               NowFunction now)
    : executor_(std::move(executor)),
      now_(std::move(now)),
      waits_for_company_(options.max_queue_delay > absl::ZeroDuration()),
      queue_(options, std::max(1, workers)) {
  const int lanes = std::max(1, workers);
  {
    MutexLock lock(&mu_);
    runs_.resize(lanes);
    for (int lane = lanes; lane > 0; --lane) free_lanes_.push_back(lane - 1);
  }
  MutexLock lock(&join_mu_);
  for (int worker = 0; worker < lanes; ++worker) {
    workers_.emplace_back([this] { Work(); });
  }
  reaper_ = std::thread([this] { Reap(); });
}

BatchScheduler::~BatchScheduler() { Drain(); }

absl::StatusOr<Ticket> BatchScheduler::Schedule(std::unique_ptr<Task>* task, Runner runner) {
  MutexLock lock(&mu_);
  if (draining_) {
    ++counts_.refused_draining;
    return absl::UnavailableError("the server is draining");
  }
  const absl::Time now = now_();
  absl::StatusOr<Ticket> ticket = queue_.Push(task, now, RunningTime(now));
  if (!ticket.ok()) return ticket;
  // If no lane is free, no worker need be woken: whoever gives a lane back looks at the queue. With
  // max_queue_delay a worker must wait for the delay, so callers run nothing.
  const bool callers = runner == Runner::kCaller && !waits_for_company_;
  if (!callers && !free_lanes_.empty()) work_.NotifyOne();
  if (const absl::Time expiry = queue_.NextExpiry(); expiry < reaper_wakes_) {
    reaper_wakes_ = expiry;
    expiry_.NotifyOne();
  }
  return ticket;
}

absl::Status BatchScheduler::CheckArrival(absl::Time deadline) {
  MutexLock lock(&mu_);
  const absl::Time now = now_();
  return queue_.CheckArrival(deadline, now, RunningTime(now));
}

void BatchScheduler::RecordAnswer(bool in_time) {
  MutexLock lock(&mu_);
  queue_.RecordAnswer(in_time);
}

bool BatchScheduler::Held() const {
  return (!hurry_ && queue_.size() < hold_until_) || free_lanes_.empty();
}

Batch BatchScheduler::BatchForCaller(absl::Time now, int64_t max_cost, bool alone, int* lane) {
  if (Held()) return Batch();
  hold_until_ = 0;
  const bool has_company = queue_.size() > 1 || free_lanes_.size() < runs_.size();
  const absl::Duration max_time = alone ? kLongestAlone : absl::InfiniteDuration();
  Batch batch = alone && has_company ? Batch() : queue_.Pop(now, hurry_, max_cost, max_time);
  if (!batch.empty()) {
    *lane = TakeLane(batch, now);
    ++running_now_;
  }
  // A worker takes what this thread must not run, or what can run beside it.
  if (queue_.size() > 0 && !free_lanes_.empty()) work_.NotifyOne();
  return batch;
}

bool BatchScheduler::RunQueued(int64_t max_cost, bool alone) {
  if (waits_for_company_) return false;
  int lane = kNoLane;
  std::vector<std::unique_ptr<Task>> expired;
  Batch batch;
  absl::Time now;
  {
    MutexLock lock(&mu_);
    if (queue_.size() == 0) return false;
    now = now_();
    expired = TakeExpired(now);
    batch = BatchForCaller(now, max_cost, alone, &lane);
  }
  FailExpired(std::move(expired), now);
  if (batch.empty()) return false;
  executor_(lane, std::move(batch));
  MutexLock lock(&mu_);
  ReturnLane(lane);
  --running_now_;
  if (draining_) work_.NotifyAll();
  return queue_.size() > 0;
}

int BatchScheduler::TakeLane(const Batch& batch, absl::Time now) {
  const int lane = free_lanes_.back();
  free_lanes_.pop_back();
  runs_[lane] = {batch.run_key, batch.load, now, batch.expected};
  return lane;
}

void BatchScheduler::ReturnLane(int lane) {
  const absl::Time now = now_();
  const Run run = std::exchange(runs_[lane], {});
  queue_.RecordRun(run.key, run.load, now - run.start, now);
  free_lanes_.push_back(lane);
}

absl::Duration BatchScheduler::RunningTime(absl::Time now) const {
  absl::Duration left;
  for (const Run& run : runs_) {
    left += std::clamp(run.start + run.expected - now, absl::ZeroDuration(), run.expected);
  }
  return left;
}

void BatchScheduler::RecordRun(const RunKey& key, int64_t load, absl::Duration took) {
  MutexLock lock(&mu_);
  queue_.RecordRun(key, load, took, now_());
}

bool BatchScheduler::Cancel(Ticket ticket) {
  std::unique_ptr<Task> task;
  {
    MutexLock lock(&mu_);
    task = queue_.Remove(ticket);
    if (task != nullptr) ++counts_.cancelled;
  }
  if (task == nullptr) return false;
  task->Fail(absl::CancelledError("cancelled by the client while queued"));
  return true;
}

void BatchScheduler::Hurry() {
  MutexLock lock(&mu_);
  hurry_ = true;
  work_.NotifyAll();
}

void BatchScheduler::Drain() {
  {
    MutexLock lock(&mu_);
    hurry_ = draining_ = true;
    work_.NotifyAll();
  }
  MutexLock lock(&join_mu_);
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  {
    MutexLock queue_lock(&mu_);
    while (running_now_ > 0) work_.Wait(&mu_);
    stopped_ = true;
    expiry_.NotifyAll();
  }
  if (reaper_.joinable()) reaper_.join();
}

int64_t BatchScheduler::queued_tasks() const {
  MutexLock lock(&mu_);
  return queue_.size();
}

SchedulerCounts BatchScheduler::counts() const {
  MutexLock lock(&mu_);
  SchedulerCounts out = counts_;
  out.refused = queue_.refused();
  return out;
}

std::vector<std::unique_ptr<Task>> BatchScheduler::TakeExpired(absl::Time now) {
  std::vector<std::unique_ptr<Task>> expired = queue_.TakeExpired(now);
  counts_.expired += static_cast<int64_t>(expired.size());
  return expired;
}

void BatchScheduler::HoldUntil(int64_t tasks) {
  MutexLock lock(&mu_);
  hold_until_ = tasks;
}

int BatchScheduler::sleeping_workers() const {
  MutexLock lock(&mu_);
  return sleeping_;
}

void BatchScheduler::Poke() {
  MutexLock lock(&mu_);
  work_.NotifyAll();
  expiry_.NotifyAll();
}

void BatchScheduler::Work() {
  int lane = kNoLane;
  for (Batch batch = NextBatch(&lane); !batch.empty(); batch = NextBatch(&lane)) {
    executor_(lane, std::move(batch));
  }
}

Batch BatchScheduler::NextBatch(int* lane) {
  for (;;) {
    std::vector<std::unique_ptr<Task>> expired;
    absl::Time now;
    {
      MutexLock lock(&mu_);
      if (*lane != kNoLane) ReturnLane(std::exchange(*lane, kNoLane));
      now = now_();
      // Expired tasks leave before a batch is formed, even if the reaper has not woken yet.
      expired = TakeExpired(now);
      if (expired.empty()) {
        const bool held = Held();
        if (!held) {
          hold_until_ = 0;
          if (Batch batch = queue_.Pop(now, hurry_); !batch.empty()) {
            *lane = TakeLane(batch, now);
            if (queue_.size() > 0 && !free_lanes_.empty()) work_.NotifyOne();
            return batch;
          }
          if (draining_) return Batch();
        }
        const absl::Time next = held ? absl::InfiniteFuture() : queue_.NextBatch(hurry_);
        ++sleeping_;
        if (next == absl::InfiniteFuture()) {
          work_.Wait(&mu_);
        } else {
          work_.WaitUntil(&mu_, WakeAt(next, now));
        }
        --sleeping_;
        continue;
      }
    }
    FailExpired(std::move(expired), now);
  }
}

void BatchScheduler::Reap() {
  for (;;) {
    std::vector<std::unique_ptr<Task>> expired;
    absl::Time now;
    {
      MutexLock lock(&mu_);
      if (stopped_) return;
      now = now_();
      expired = TakeExpired(now);
      if (expired.empty()) {
        const absl::Time next = queue_.NextExpiry();
        if (next == absl::InfiniteFuture()) {
          reaper_wakes_ = next;
          expiry_.Wait(&mu_);
        } else {
          reaper_wakes_ = std::min(next, now + kLongestWait);
          expiry_.WaitUntil(&mu_, WakeAt(next, now));
        }
        continue;
      }
    }
    FailExpired(std::move(expired), now);
  }
}

}  // namespace awqd::batching
