// BatchQueue: the waiting tasks, and which batch leaves next. No threads, no locks, no clock.
//
// Tasks with equal keys wait in one line, ordered by priority and then by arrival. A batch is the
// front of the most urgent line, up to max_batch_tokens.
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
#include "server/batching/task.h"

namespace awqd::batching {

// Names an accepted task; never reused within a queue.
using Ticket = uint64_t;

struct BatchOptions {
  // Tokens of a batch at most. A larger batch reads the weight once for more tokens. That pays
  // until the product is bound by arithmetic, at a few hundred tokens; beyond that it only adds
  // latency. A single task that is larger still runs, alone.
  int64_t max_batch_tokens = 2048;
  // How long the oldest of the tasks with equal keys waits for others to merge with while a worker
  // is idle. 0, the default: an idle worker starts at once, and batches form only while all workers
  // are busy. Raise it only when throughput matters more than the latency of a lone request.
  absl::Duration max_queue_delay = absl::ZeroDuration();
  // A task that has waited this long goes before tasks of every priority, so that urgent ones
  // cannot keep it waiting for ever.
  absl::Duration max_starvation = absl::Milliseconds(500);
  // Bounds on waiting tasks; a task beyond them is refused. Choose them so that a full queue drains
  // within the callers' deadlines.
  int64_t max_queued_tasks = 4096;
  int64_t max_queued_tokens = 65536;
  int64_t max_queued_bytes = int64_t{512} << 20;
};

// Invariants between calls:
//  - every queued task is in exactly one line and in by_ticket_; with a finite deadline also in
//  deadlines_;
//  - no line and no level of a line is empty; a line's tokens are the sum over its tasks;
//  - size_, tokens_ and bytes_ are sums over all lines and count no refused task.
class BatchQueue {
 public:
  explicit BatchQueue(const BatchOptions& options) : options_(options) {}

  // Takes ownership of the task only on OK. RESOURCE_EXHAUSTED: names the bound that was reached.
  // Where std::bad_alloc leaves it, the queue and the task are as they were.
  absl::StatusOr<Ticket> Push(std::unique_ptr<Task>* task, absl::Time now);

  // Takes the task out; null when it is not queued.
  std::unique_ptr<Task> Remove(Ticket ticket);

  // Takes out every task whose deadline is at or before `now`.
  std::vector<std::unique_ptr<Task>> TakeExpired(absl::Time now);
  // The earliest deadline of a queued task; InfiniteFuture without one.
  absl::Time NextDeadline() const;

  // The earliest time at which Pop returns a batch, in the past when one is ready; InfiniteFuture
  // when nothing is queued. `hurry` ignores max_queue_delay.
  absl::Time NextBatch(bool hurry) const;
  // Takes out the most urgent batch that is ready. Returns an empty batch when none is ready, or
  // when that batch costs more than `max_cost`.
  Batch Pop(absl::Time now, bool hurry, int64_t max_cost = Task::kUnknownCost);

  int64_t size() const { return size_; }
  int64_t tokens() const { return tokens_; }
  int64_t bytes() const { return bytes_; }

 private:
  struct Entry {
    Ticket ticket;
    std::unique_ptr<Task> task;
  };
  using Level = std::list<Entry>;
  struct Line {
    std::map<int, Level, std::greater<>> levels;  // by priority
    int64_t tokens = 0;
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

  absl::Status CheckRoom(const Task& task) const;
  // The entry of the line that has waited longest.
  static const Entry& Oldest(const Line& line);
  absl::Time ReadyAt(const BatchKey& key, const Line& line, bool hurry) const;
  // True when `a` should leave before `b`.
  bool Before(const Line& a, const Line& b, absl::Time now) const;
  bool Starving(const Entry& entry, absl::Time now) const;
  // The tasks that form the line's next batch, in order.
  std::vector<Ticket> Collect(const Line& line, absl::Time now) const;
  // True when these tasks together cost at most `max_cost`.
  bool CostsAtMost(int64_t max_cost, const std::vector<Ticket>& tickets) const;
  // Undoes a Push that failed: removes the task's entry, and the parts of its line that are empty.
  void Forget(Ticket ticket, const Place& place, absl::Time deadline);
  std::unique_ptr<Task> RemoveTask(Ticket ticket);

  const BatchOptions options_;
  Lines lines_;
  std::unordered_map<Ticket, Place> by_ticket_;
  std::set<std::pair<absl::Time, Ticket>> deadlines_;
  Ticket next_ticket_ = 1;
  int64_t size_ = 0;
  int64_t tokens_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace awqd::batching
