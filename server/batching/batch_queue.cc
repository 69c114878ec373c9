// BatchQueue: bounds, order, batches, expiry.
#include "server/batching/batch_queue.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/retry_delay.h"
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

// A task is admitted if its wait, as far as is known, takes no more than this part of the time that
// it may wait. The rest is for urgent tasks that come later, and for batches: a task that starts at
// the last moment runs alone.
constexpr double kWaitShare = 0.75;

absl::Status TooLate(absl::string_view what, absl::Duration retry) {
  return WithRetryDelay(absl::ResourceExhaustedError(what), std::max(retry, absl::Milliseconds(1)));
}

std::string Text(absl::Duration duration) {
  return absl::FormatDuration(absl::Trunc(duration, absl::Microseconds(10)));
}

}  // namespace

absl::Status BatchQueue::CheckRoom(const Task& task) {
  absl::Status status;
  // An empty queue accepts a task that is larger than a bound: bounds are on how much waits, not on
  // how large a task may be.
  if (size_ >= options_.max_queued_tasks) {
    status = Full("requests", size_, 1, options_.max_queued_tasks);
  } else if (size_ > 0 && task.tokens() > options_.max_queued_tokens - tokens_) {
    status = Full("tokens", tokens_, task.tokens(), options_.max_queued_tokens);
  } else if (size_ > 0 && task.bytes() > options_.max_queued_bytes - bytes_) {
    status = Full("bytes", bytes_, task.bytes(), options_.max_queued_bytes);
  }
  if (!status.ok()) ++refused_.full;
  return status;
}

absl::StatusOr<BatchQueue::Forecast> BatchQueue::CheckTime(const Task& task, const BatchKey& key,
                                                           absl::Time now, absl::Duration running) {
  const RunTimes::Curve* const curve = run_times_.Find(task.run_key());
  const auto expect = [&](int64_t load) {
    return curve == nullptr ? RunTime() : curve->Expect(load, now);
  };
  const RunTime alone = expect(task.load());
  Forecast out = {.adds = alone.usual, .batch_load = task.load(), .batch_tokens = task.tokens()};
  if (const auto line = lines_.find(key); line != lines_.end()) {
    const Line& ahead = line->second;
    const absl::Duration together = expect(ahead.batch_load + task.load()).usual;
    if (ahead.batch_tokens + task.tokens() <= options_.max_batch_tokens &&
        together <= options_.max_batch_time) {
      const absl::Duration before = expect(ahead.batch_load).usual;
      out.adds = std::max(together - before, absl::ZeroDuration());
      out.batch_load += ahead.batch_load;
      out.batch_tokens += ahead.batch_tokens;
    }
  }
  if (task.priority != priority_) priorities_mixed_ = now;
  priority_ = task.priority;
  least_time_ = std::min(alone.usual, least_time_ + (alone.usual - least_time_) / 16);
  const absl::Duration wait = Wait(task.priority, running);
  const bool idle = size_ == 0 && running <= absl::ZeroDuration();
  // An idle device tries all that it may be able to do.
  const absl::Duration own = !idle ? alone.usual : alone.sure ? alone.best : absl::ZeroDuration();
  out.expires = task.due();
  if (wait + own <= absl::ZeroDuration()) return out;  // nothing is known
  const absl::Duration left = task.due() - now;
  AWQD_RETURN_IF_ERROR(CheckWait(wait, left, own));
  if (task.deadline < absl::InfiniteFuture()) out.expires -= TimeToAnswer(left) + own;
  return out;
}

// Nothing here sees the network, the client, or the time that a busy server took to read a request.
// So the share grows by a half whenever a result was late, and shrinks by 1/512 otherwise: the two
// balance when 1 in 200 is late.
void BatchQueue::RecordAnswer(bool in_time) {
  constexpr double kMostAnswerShare = 1.0 / 3;
  answer_share_ = std::clamp(answer_share_ * (in_time ? 1 - 1.0 / 512 : 1.5), kLeastAnswerShare,
                             kMostAnswerShare);
}

absl::Duration BatchQueue::TimeToAnswer(absl::Duration left) const { return left * answer_share_; }

absl::Duration BatchQueue::Wait(int priority, absl::Duration running) const {
  absl::Duration wait = running;
  for (const auto& [level, waiting] : waiting_) {
    if (level < priority) break;
    wait += waiting.time;
  }
  return wait / lanes_;
}

absl::Duration BatchQueue::MayWait(absl::Duration left, absl::Duration own) const {
  return (left - TimeToAnswer(left) - own) * kWaitShare;
}

absl::Duration BatchQueue::LongestWait(absl::Duration own) const {
  const double times = absl::FDivDuration(own, BatchOptions::kShortTask);
  return options_.max_queue_time * std::max(1.0, times);
}

absl::Status BatchQueue::CheckWait(absl::Duration wait, absl::Duration left, absl::Duration own) {
  if (const absl::Duration longest = LongestWait(own); wait > longest) {
    ++refused_.too_long;
    return TooLate(absl::StrCat("queue: about ", Text(wait), " of work waits, expected at most ",
                                Text(longest)),
                   wait - longest);
  }
  if (left == absl::InfiniteDuration()) return absl::OkStatus();
  const absl::Duration may_wait = MayWait(left, own);
  if (wait <= may_wait) return absl::OkStatus();
  ++refused_.too_late;
  return TooLate(absl::StrCat("deadline: got ", Text(left), ", expected at least ",
                              Text(wait / kWaitShare + own + TimeToAnswer(left)), ", as ",
                              Text(wait), " of work waits and this takes about ", Text(own)),
                 wait - std::max(may_wait, absl::ZeroDuration()));
}

absl::Status BatchQueue::CheckArrival(absl::Time deadline, absl::Time now, absl::Duration running) {
  // Requests of several priorities must be read: an urgent one may be in time.
  constexpr absl::Duration kMixed = absl::Seconds(10);
  constexpr int64_t kSeen = 16;
  const bool idle = size_ == 0 && running <= absl::ZeroDuration();
  if (idle || now - priorities_mixed_ < kMixed) return absl::OkStatus();
  const absl::Duration wait = Wait(priority_, running);
  const absl::Duration left = deadline - now;
  const bool in_time = wait <= LongestWait(least_time_) && wait <= MayWait(left, least_time_);
  if (in_time || ++unseen_ % kSeen == 0) return absl::OkStatus();
  return CheckWait(wait, left, least_time_);
}

absl::StatusOr<Ticket> BatchQueue::Push(std::unique_ptr<Task>* task, absl::Time now,
                                        absl::Duration running) {
  Task& queued = **task;
  const Ticket ticket = next_ticket_;
  const Place place = {LineKey(queued), queued.priority, {}};
  AWQD_RETURN_IF_ERROR(CheckRoom(queued));
  AWQD_ASSIGN_OR_RETURN(const Forecast forecast, CheckTime(queued, place.key, now, running));
  // Everything that needs memory comes first, and is undone where there is none.
  absl::Cleanup undo = [&] { Forget(ticket, place, forecast.expires); };
  Waiting& waiting = waiting_[place.priority];
  Level entry;
  entry.push_back({ticket, nullptr, forecast.adds, forecast.expires});
  Line& line = lines_[place.key];
  Level& level = line.levels[place.priority];
  by_ticket_.emplace(ticket, Place{place.key, place.priority, entry.begin()});
  if (queued.deadline != absl::InfiniteFuture()) expiries_.emplace(forecast.expires, ticket);
  std::move(undo).Cancel();
  // From here on nothing fails.
  entry.front().task = std::move(*task);
  level.splice(level.end(), entry);
  queued.enqueued = now;
  next_ticket_ += 1;
  line.tokens += queued.tokens();
  line.batch_load = forecast.batch_load;
  line.batch_tokens = forecast.batch_tokens;
  waiting.time += forecast.adds;
  waiting.tasks += 1;
  size_ += 1;
  tokens_ += queued.tokens();
  bytes_ += queued.bytes();
  return ticket;
}

void BatchQueue::Forget(Ticket ticket, const Place& place, absl::Time expires) {
  expiries_.erase({expires, ticket});
  by_ticket_.erase(ticket);
  const auto waiting = waiting_.find(place.priority);
  if (waiting != waiting_.end() && waiting->second.tasks == 0) waiting_.erase(waiting);
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
  expiries_.erase({place.entry->expires, ticket});
  const auto waiting = waiting_.find(place.priority);
  waiting->second.time -= place.entry->adds;
  if (--waiting->second.tasks == 0) waiting_.erase(waiting);
  const auto line = lines_.find(place.key);
  const auto level = line->second.levels.find(place.priority);
  level->second.erase(place.entry);
  if (level->second.empty()) line->second.levels.erase(level);
  line->second.tokens -= task->tokens();
  if (line->second.levels.empty()) lines_.erase(line);
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
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    expired.push_back(RemoveTask(expiries_.begin()->second));
  }
  return expired;
}

absl::Time BatchQueue::NextExpiry() const {
  return expiries_.empty() ? absl::InfiniteFuture() : expiries_.begin()->first;
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
  return !last_was_starving_ && now - entry.task->enqueued >= options_.max_starvation;
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
  int64_t tokens = 0, load = 0;
  // Tasks of a line have equal keys.
  const RunTimes::Curve* const curve = run_times_.Find(Oldest(line).task->run_key());
  // The first deadline of a task that can be met.
  absl::Time deadline = absl::InfiniteFuture();
  // Returns false once an entry does not fit. The batch ends there, so that no smaller task
  // overtakes that entry.
  const auto add = [&](const Entry& entry) {
    const Task& task = *entry.task;
    const absl::Time due = task.due();
    const absl::Time latest =
        due == absl::InfiniteFuture() ? due : due - TimeToAnswer(due - task.enqueued);
    if (!taken.empty()) {
      if (tokens + task.tokens() > options_.max_batch_tokens) return false;
      const absl::Duration takes =
          curve == nullptr ? absl::Duration() : curve->Expect(load + task.load(), now).usual;
      if (takes > options_.max_batch_time || now + takes > std::min(deadline, latest)) return false;
    }
    taken.push_back(entry.ticket);
    tokens += task.tokens();
    load += task.load();
    deadline = std::min(deadline, latest);
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

Batch BatchQueue::Pop(absl::Time now, bool hurry, int64_t max_cost, absl::Duration max_time) {
  const Line* best = nullptr;
  for (const auto& [key, line] : lines_) {
    if (ReadyAt(key, line, hurry) > now) continue;
    if (best == nullptr || Before(line, *best, now)) best = &line;
  }
  Batch batch;
  if (best == nullptr) return batch;
  const bool starving = Starving(Oldest(*best), now);
  const std::vector<Ticket> tickets = Collect(*best, now);
  if (!CostsAtMost(max_cost, tickets)) return batch;
  for (Ticket ticket : tickets) batch.load += by_ticket_.at(ticket).entry->task->load();
  batch.run_key = by_ticket_.at(tickets.front()).entry->task->run_key();
  batch.expected = run_times_.Expect(batch.run_key, batch.load, now).usual;
  if (batch.expected > max_time) return Batch();
  for (Ticket ticket : tickets) {
    batch.tasks.push_back(RemoveTask(ticket));
    batch.tokens += batch.tasks.back()->tokens();
  }
  last_was_starving_ = starving;
  return batch;
}

}  // namespace awqd::batching
