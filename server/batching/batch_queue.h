// BatchQueue: the waiting tasks, and which batch leaves next. No threads, no locks, no clock.
//
// Tasks with equal keys wait in one line, ordered by priority and then by arrival. A batch is the
// front of the most urgent line, up to max_batch_tokens and max_batch_time.
//
// Admission by time: a task is refused when its deadline would pass, or max_queue_time, before its
// turn has come. A task that can no longer arrive in time has expired.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/batching/run_times.h"
#include "server/batching/task.h"

namespace awqd::batching {

// Names an accepted task; never reused within a queue.
using Ticket = uint64_t;

struct BatchOptions {
  // Tokens of a batch at most. A larger batch reads the weight once for more tokens. That pays
  // until the product is bound by arithmetic, at a few hundred tokens; beyond that it only adds
  // latency. A single task that is larger still runs, alone.
  int64_t max_batch_tokens = 2048;
  // The expected time of a batch at most, so that what arrives meanwhile need not wait longer. A
  // single task that takes longer still runs, alone.
  absl::Duration max_batch_time = absl::Milliseconds(50);
  // How long the oldest of the tasks with equal keys waits for others to merge with while a worker
  // is idle. 0, the default: an idle worker starts at once, and batches form only while all workers
  // are busy. Raise it only when throughput matters more than the latency of a lone request.
  absl::Duration max_queue_delay = absl::ZeroDuration();
  // A task that has waited this long goes before tasks of every priority, in every second batch, so
  // that urgent ones cannot keep it waiting for ever.
  absl::Duration max_starvation = absl::Milliseconds(500);
  // A task that would wait longer than this before it starts is refused. A task that takes more than
  // kShortTask itself may wait longer in proportion.
  absl::Duration max_queue_time = absl::Seconds(1);
  static constexpr absl::Duration kShortTask = absl::Milliseconds(16);
  // Bounds on waiting tasks; a task beyond them is refused. Choose them so that a full queue drains
  // within the callers' deadlines.
  int64_t max_queued_tasks = 4096;
  int64_t max_queued_tokens = 65536;
  int64_t max_queued_bytes = int64_t{512} << 20;
};

// Invariants between calls:
//  - every queued task is in exactly one line and in by_ticket_; with a finite deadline also in
//  expiries_;
//  - no line and no level of a line is empty; a line's tokens are the sum over its tasks;
//  - size_, tokens_, bytes_ and waiting_ are sums over all lines and count no refused task.
class BatchQueue {
 public:
  // `lanes`: how many batches run at a time.
  explicit BatchQueue(const BatchOptions& options, int lanes = 1)
      : options_(options), lanes_(lanes) {}

  // Takes ownership of the task only on OK. RESOURCE_EXHAUSTED: names the bound that was reached,
  // with a retry delay where it is one of time. `running`: what is left of the batches that run,
  // summed. Where std::bad_alloc leaves it, the queue and the task are as they were.
  absl::StatusOr<Ticket> Push(std::unique_ptr<Task>* task, absl::Time now,
                              absl::Duration running = absl::ZeroDuration());

  // For a request of which only the deadline is known yet. RESOURCE_EXHAUSTED: it would be refused
  // whatever it is. Some are let through all the same, so that the queue sees what comes.
  absl::Status CheckArrival(absl::Time deadline, absl::Time now, absl::Duration running);

  // Takes the task out; null when it is not queued.
  std::unique_ptr<Task> Remove(Ticket ticket);

  // Takes out every task that could not arrive before its deadline if it started at `now`.
  std::vector<std::unique_ptr<Task>> TakeExpired(absl::Time now);
  // When the next queued task expires; InfiniteFuture if none does.
  absl::Time NextExpiry() const;

  // The earliest time at which Pop returns a batch, in the past when one is ready; InfiniteFuture
  // when nothing is queued. `hurry` ignores max_queue_delay.
  absl::Time NextBatch(bool hurry) const;
  // Takes out the most urgent batch that is ready. Returns an empty batch when none is ready, or
  // when that batch costs more than `max_cost` or is known to take longer than `max_time`.
  Batch Pop(absl::Time now, bool hurry, int64_t max_cost = Task::kUnknownCost,
            absl::Duration max_time = absl::InfiniteDuration());

  // A batch of this key and load has run.
  void RecordRun(const RunKey& key, int64_t load, absl::Duration took, absl::Time now) {
    run_times_.Record(key, load, took, now);
  }

  // A result reached its client before the deadline, or it was computed in vain.
  void RecordAnswer(bool in_time);

  struct Refused {
    int64_t full = 0;      // a bound on waiting tasks was reached
    int64_t too_late = 0;  // the deadline would have passed
    int64_t too_long = 0;  // the wait would have passed max_queue_time
  };
  const Refused& refused() const { return refused_; }

  int64_t size() const { return size_; }
  int64_t tokens() const { return tokens_; }
  int64_t bytes() const { return bytes_; }

 private:
  // When a task would run, as far as is known when it comes.
  struct Forecast {
    absl::Duration adds;  // to the time that the queue takes
    absl::Time expires = absl::InfiniteFuture();
    // The load of the batch of its line that it would join as the last, itself included.
    int64_t batch_load = 0, batch_tokens = 0;
  };
  struct Entry {
    Ticket ticket;
    std::unique_ptr<Task> task;
    absl::Duration adds;
    absl::Time expires;
  };
  struct Waiting {
    absl::Duration time;
    int64_t tasks = 0;
  };
  using Level = std::list<Entry>;
  struct Line {
    std::map<int, Level, std::greater<>> levels;  // by priority
    int64_t tokens = 0;
    // The last of the batches that the line is expected to leave in.
    int64_t batch_load = 0, batch_tokens = 0;
  };
  struct KeyHash {
    size_t operator()(const BatchKey& key) const {
      return std::hash<const void*>()(key.subject) * 31 + key.variant;
    }
  };
  using Lines = std::unordered_map<BatchKey, Line, KeyHash>;
  struct Place {
    BatchKey key;
    int priority;
    Level::iterator entry;
  };

  static constexpr double kLeastAnswerShare = 1.0 / 32;

  absl::Status CheckRoom(const Task& task);
  // The part of the time until a deadline that a finished result needs on its way to the client.
  absl::Duration TimeToAnswer(absl::Duration left) const;
  // The time until a task of this priority starts.
  absl::Duration Wait(int priority, absl::Duration running) const;
  // The longest that a task may wait that takes `own` and has `left` until its deadline.
  absl::Duration MayWait(absl::Duration left, absl::Duration own) const;
  // The longest that any task may wait that takes `own`.
  absl::Duration LongestWait(absl::Duration own) const;
  // RESOURCE_EXHAUSTED: a request that waits so long, and takes `own`, would be too late.
  absl::Status CheckWait(absl::Duration wait, absl::Duration left, absl::Duration own);
  // Where the task would stand if it came now. RESOURCE_EXHAUSTED: its turn would come too late.
  absl::StatusOr<Forecast> CheckTime(const Task& task, const BatchKey& key, absl::Time now,
                                     absl::Duration running);
  // The entry of the line that has waited longest.
  static const Entry& Oldest(const Line& line);
  absl::Time ReadyAt(const BatchKey& key, const Line& line, bool hurry) const;
  // True when `a` should leave before `b`.
  bool Before(const Line& a, const Line& b, absl::Time now) const;
  // True when it has waited max_starvation, unless the last batch was one of such a task.
  bool Starving(const Entry& entry, absl::Time now) const;
  // The tasks that form the line's next batch, in order.
  std::vector<Ticket> Collect(const Line& line, absl::Time now) const;
  // True when these tasks together cost at most `max_cost`.
  bool CostsAtMost(int64_t max_cost, const std::vector<Ticket>& tickets) const;
  // Undoes a Push that failed: removes the task's entry, and the parts of its line that are empty.
  void Forget(Ticket ticket, const Place& place, absl::Time expires);
  std::unique_ptr<Task> RemoveTask(Ticket ticket);

  const BatchOptions options_;
  const int lanes_;
  RunTimes run_times_;
  Refused refused_;
  Lines lines_;
  std::unordered_map<Ticket, Place> by_ticket_;
  std::set<std::pair<absl::Time, Ticket>> expiries_;
  std::map<int, Waiting, std::greater<>> waiting_;  // by priority, of those that have tasks
  // The priority of the latest task, and when a task last had another one than the task before it.
  int priority_ = 0;
  // The time that the shorter ones of the latest tasks take alone: an average that falls at once.
  absl::Duration least_time_;
  absl::Time priorities_mixed_ = absl::InfinitePast();
  int64_t unseen_ = 0;  // requests that CheckArrival refused
  // The share of the time until a deadline that TimeToAnswer keeps.
  double answer_share_ = kLeastAnswerShare;
  bool last_was_starving_ = false;  // the last batch
  Ticket next_ticket_ = 1;
  int64_t size_ = 0;
  int64_t tokens_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace awqd::batching
