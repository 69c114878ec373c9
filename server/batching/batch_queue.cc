// BatchQueue: bounds, order, batches, expiry.
#include "server/batching/batch_queue.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd::batching {
namespace {

absl::Status Full(absl::string_view what, int64_t queued, int64_t more, int64_t limit) {
  return absl::ResourceExhaustedError(absl::StrCat("queue full: ", queued, " ", what,
                                                   " queued and ", more,
                                                   " more asked for, the limit is ", limit));
}

// The key under which a task is queued: its own; for a task that never merges, one that no other
// task has.
BatchKey LineKey(const Task& task) {
  const BatchKey key = task.key();
  return key.subject != nullptr ? key : BatchKey{&task, ~uint64_t{0}};
}

bool Mergeable(const BatchKey& key) { return key.variant != ~uint64_t{0}; }

}  // namespace

absl::Status BatchQueue::CheckRoom(const Task& task) const {
  if (size_ >= options_.max_queued_tasks) {
    return Full("requests", size_, 1, options_.max_queued_tasks);
  }
  // An empty queue accepts a task that is larger than a bound: bounds are on how much waits, not on
  // how large a task may be.
  if (size_ == 0) return absl::OkStatus();
  if (task.tokens() > options_.max_queued_tokens - tokens_) {
    return Full("tokens", tokens_, task.tokens(), options_.max_queued_tokens);
  }
  if (task.bytes() > options_.max_queued_bytes - bytes_) {
    return Full("bytes", bytes_, task.bytes(), options_.max_queued_bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<Ticket> BatchQueue::Push(std::unique_ptr<Task>* task, absl::Time now) {
  AWQD_RETURN_IF_ERROR(CheckRoom(**task));
  Task& queued = **task;
  const Ticket ticket = next_ticket_;
  const Place place = {LineKey(queued), queued.priority, {}};
  // Everything that needs memory comes first, and is undone where there is none.
  absl::Cleanup undo = [&] { Forget(ticket, place, queued.deadline); };
  Level entry;
  entry.push_back({ticket, nullptr});
  Line& line = lines_[place.key];
  Level& level = line.levels[place.priority];
  by_ticket_.emplace(ticket, Place{place.key, place.priority, entry.begin()});
  if (queued.deadline != absl::InfiniteFuture()) deadlines_.emplace(queued.deadline, ticket);
  std::move(undo).Cancel();
  // From here on nothing fails.
  entry.front().task = std::move(*task);
  level.splice(level.end(), entry);
  queued.enqueued = now;
  next_ticket_ += 1;
  line.tokens += queued.tokens();
  size_ += 1;
  tokens_ += queued.tokens();
  bytes_ += queued.bytes();
  return ticket;
}

void BatchQueue::Forget(Ticket ticket, const Place& place, absl::Time deadline) {
  deadlines_.erase({deadline, ticket});
  by_ticket_.erase(ticket);
  const auto line = lines_.find(place.key);
  if (line == lines_.end()) return;
  const auto level = line->second.levels.find(place.priority);
  if (level != line->second.levels.end() && level->second.empty()) {
    line->second.levels.erase(level);
  }
  if (line->second.levels.empty()) lines_.erase(line);
}

std::unique_ptr<Task> BatchQueue::RemoveTask(Ticket ticket) {
  const auto found = by_ticket_.find(ticket);
  const Place place = found->second;
  by_ticket_.erase(found);
  std::unique_ptr<Task> task = std::move(place.entry->task);
  const auto line = lines_.find(place.key);
  const auto level = line->second.levels.find(place.priority);
  level->second.erase(place.entry);
  if (level->second.empty()) line->second.levels.erase(level);
  line->second.tokens -= task->tokens();
  if (line->second.levels.empty()) lines_.erase(line);
  if (task->deadline != absl::InfiniteFuture()) deadlines_.erase({task->deadline, ticket});
  size_ -= 1;
  tokens_ -= task->tokens();
  bytes_ -= task->bytes();
  return task;
}

std::unique_ptr<Task> BatchQueue::Remove(Ticket ticket) {
  return by_ticket_.contains(ticket) ? RemoveTask(ticket) : nullptr;
}

std::vector<std::unique_ptr<Task>> BatchQueue::TakeExpired(absl::Time now) {
  std::vector<std::unique_ptr<Task>> expired;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    expired.push_back(RemoveTask(deadlines_.begin()->second));
  }
  return expired;
}

absl::Time BatchQueue::NextDeadline() const {
  return deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first;
}

const BatchQueue::Entry& BatchQueue::Oldest(const Line& line) {
  const Entry* oldest = nullptr;
  for (const auto& [priority, level] : line.levels) {
    if (oldest == nullptr || level.front().ticket < oldest->ticket) oldest = &level.front();
  }
  return *oldest;
}

absl::Time BatchQueue::ReadyAt(const BatchKey& key, const Line& line, bool hurry) const {
  const absl::Time oldest = Oldest(line).task->enqueued;
  const bool waits = !hurry && Mergeable(key) && line.tokens < options_.max_batch_tokens;
  return waits ? oldest + options_.max_queue_delay : oldest;
}

bool BatchQueue::Starving(const Entry& entry, absl::Time now) const {
  return now - entry.task->enqueued >= options_.max_starvation;
}

bool BatchQueue::Before(const Line& a, const Line& b, absl::Time now) const {
  const Entry& oldest_a = Oldest(a);
  const Entry& oldest_b = Oldest(b);
  const bool starving_a = Starving(oldest_a, now);
  if (starving_a != Starving(oldest_b, now)) return starving_a;
  if (starving_a) return oldest_a.ticket < oldest_b.ticket;
  const auto& top_a = *a.levels.begin();
  const auto& top_b = *b.levels.begin();
  if (top_a.first != top_b.first) return top_a.first > top_b.first;
  return top_a.second.front().ticket < top_b.second.front().ticket;
}

absl::Time BatchQueue::NextBatch(bool hurry) const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [key, line] : lines_) next = std::min(next, ReadyAt(key, line, hurry));
  return next;
}

std::vector<Ticket> BatchQueue::Collect(const Line& line, absl::Time now) const {
  std::vector<Ticket> taken;
  int64_t tokens = 0;
  // Returns false once an entry does not fit. The batch ends there, so that no smaller task
  // overtakes that entry.
  const auto add = [&](const Entry& entry) {
    if (!taken.empty() && tokens + entry.task->tokens() > options_.max_batch_tokens) return false;
    taken.push_back(entry.ticket);
    tokens += entry.task->tokens();
    return true;
  };
  const Entry& oldest = Oldest(line);
  const bool starving = Starving(oldest, now);
  if (starving) add(oldest);
  for (const auto& [priority, level] : line.levels) {
    for (const Entry& entry : level) {
      if (starving && entry.ticket == oldest.ticket) continue;
      if (!add(entry)) return taken;
    }
  }
  return taken;
}

bool BatchQueue::CostsAtMost(int64_t max_cost, const std::vector<Ticket>& tickets) const {
  if (max_cost == Task::kUnknownCost) return true;
  for (Ticket ticket : tickets) {
    const int64_t cost = by_ticket_.at(ticket).entry->task->cost();
    if (cost > max_cost) return false;
    max_cost -= cost;
  }
  return true;
}

Batch BatchQueue::Pop(absl::Time now, bool hurry, int64_t max_cost) {
  const Line* best = nullptr;
  for (const auto& [key, line] : lines_) {
    if (ReadyAt(key, line, hurry) > now) continue;
    if (best == nullptr || Before(line, *best, now)) best = &line;
  }
  Batch batch;
  if (best == nullptr) return batch;
  const std::vector<Ticket> tickets = Collect(*best, now);
  if (!CostsAtMost(max_cost, tickets)) return batch;
  for (Ticket ticket : tickets) {
    batch.tasks.push_back(RemoveTask(ticket));
    batch.tokens += batch.tasks.back()->tokens();
  }
  return batch;
}

}  // namespace awqd::batching
