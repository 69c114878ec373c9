// BatchScheduler: threads around the queue; with a clock that stands still and an executor that the
// test holds.
#include "server/batching/batch_scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/server/batching/puppet.h"
#include "tests/testing/fake_clock.h"

namespace awqd::batching {
namespace {

using ::awqd::testing::FakeClock;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class BatchSchedulerTest : public ::testing::Test {
 protected:
  void Start(const BatchOptions& options = {}, int workers = 1) {
    scheduler_ = std::make_unique<BatchScheduler>(
        options, workers,
        [this](int, Batch batch) {
          gate_.Pass();
          std::vector<std::string> names;
          for (auto& task : batch.tasks) names.push_back(static_cast<PuppetTask&>(*task).name());
          journal_.Add(absl::StrJoin(names, "+") + ":ran");
        },
        &clock_);
    // A worker that is still on its way would take what is its caller's.
    while (scheduler_->sleeping_workers() < workers) std::this_thread::yield();
  }

  absl::StatusOr<Ticket> Add(const std::string& name, int priority = 0,
                             absl::Duration deadline = absl::InfiniteDuration()) {
    std::unique_ptr<Task> task =
        std::make_unique<PuppetTask>(name, &journal_, 1, 1, BatchKey{&subject_, 0});
    task->priority = priority;
    task->deadline = clock_.Now() + deadline;
    auto ticket = scheduler_->Schedule(&task);
    EXPECT_EQ(task == nullptr, ticket.ok()) << "ownership moves only on OK";
    return ticket;
  }

  // The caller runs it, with RunQueued.
  absl::StatusOr<Ticket> AddMine(const std::string& name, int priority = 0,
                                 absl::Duration deadline = absl::InfiniteDuration(),
                                 int64_t cost = 1) {
    auto task = std::make_unique<PuppetTask>(name, &journal_, 1, 1, BatchKey{&subject_, 0});
    task->set_cost(cost);
    task->priority = priority;
    task->deadline = clock_.Now() + deadline;
    std::unique_ptr<Task> owned = std::move(task);
    return scheduler_->Schedule(&owned, Runner::kCaller);
  }

  // Occupies the only worker, so that what follows stays queued.
  void Hold() {
    ASSERT_TRUE(Add("held").ok());
    gate_.AwaitInside(1);
  }

  std::vector<std::string> Finish() {
    gate_.Open();
    scheduler_->Drain();
    return journal_.lines();
  }

  // Waits for the reaper to have written `count` lines.
  std::vector<std::string> AwaitLines(size_t count) {
    while (journal_.lines().size() < count) std::this_thread::yield();
    return journal_.lines();
  }

  int subject_ = 0;
  FakeClock clock_;
  Gate gate_;
  Journal journal_;
  std::unique_ptr<BatchScheduler> scheduler_;
};

TEST_F(BatchSchedulerTest, AnIdleWorkerStartsAtOnceAndABusyOneLetsTasksGather) {
  Start();
  Hold();
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(Add(name).ok());
  EXPECT_EQ(scheduler_->queued_tasks(), 3);
  EXPECT_THAT(Finish(), ElementsAre("held:ran", "a+b+c:ran"));
  EXPECT_EQ(scheduler_->queued_tasks(), 0);
}

TEST_F(BatchSchedulerTest, HoldUntilGathersAKnownBatch) {
  Start();
  gate_.Open();
  scheduler_->HoldUntil(3);
  for (const char* name : {"a", "b"}) ASSERT_TRUE(Add(name).ok());
  EXPECT_EQ(scheduler_->queued_tasks(), 2);
  ASSERT_TRUE(Add("c").ok());
  EXPECT_THAT(AwaitLines(1), ElementsAre("a+b+c:ran"));
}

TEST_F(BatchSchedulerTest, DelayHoldsALoneTaskUntilItsAgeIsReached) {
  Start({.max_queue_delay = absl::Milliseconds(5)});
  gate_.Open();
  ASSERT_TRUE(Add("a").ok());
  clock_.Advance(absl::Milliseconds(4));
  scheduler_->Poke();
  ASSERT_TRUE(Add("b").ok());
  EXPECT_EQ(scheduler_->queued_tasks(), 2);
  clock_.Advance(absl::Milliseconds(1));
  scheduler_->Poke();
  EXPECT_THAT(AwaitLines(1), ElementsAre("a+b:ran"));
}

TEST_F(BatchSchedulerTest, HurryEndsTheWaitAndStillAcceptsTasks) {
  Start({.max_queue_delay = absl::Hours(1)});
  gate_.Open();
  ASSERT_TRUE(Add("a").ok());
  scheduler_->Hurry();
  EXPECT_THAT(AwaitLines(1), ElementsAre("a:ran"));
  ASSERT_TRUE(Add("b").ok());
  EXPECT_THAT(AwaitLines(2), ElementsAre("a:ran", "b:ran"));
}

TEST_F(BatchSchedulerTest, ExpiredTaskLeavesWhileTheWorkerIsBusy) {
  Start();
  Hold();
  ASSERT_TRUE(Add("short", 0, absl::Milliseconds(5)).ok());
  ASSERT_TRUE(Add("long", 0, absl::Milliseconds(50)).ok());
  clock_.Advance(absl::Milliseconds(10));
  scheduler_->Poke();
  EXPECT_THAT(AwaitLines(1), ElementsAre("short:DEADLINE_EXCEEDED"));
  EXPECT_EQ(scheduler_->queued_tasks(), 1);
  EXPECT_THAT(Finish(), ElementsAre("short:DEADLINE_EXCEEDED", "held:ran", "long:ran"));
}

TEST_F(BatchSchedulerTest, AnEarlierDeadlineMovesTheReaperForward) {
  Start();
  Hold();
  ASSERT_TRUE(Add("late", 0, absl::Hours(1)).ok());
  ASSERT_TRUE(Add("soon", 0, absl::Milliseconds(1)).ok());
  clock_.Advance(absl::Milliseconds(2));
  // No poke: the reaper was told of the earlier deadline and waits a millisecond of real time for
  // it.
  EXPECT_THAT(AwaitLines(1), ElementsAre("soon:DEADLINE_EXCEEDED"));
  EXPECT_EQ(Finish().size(), 3u);
}

TEST_F(BatchSchedulerTest, CancelTakesAQueuedTaskOutAtOnce) {
  Start();
  Hold();
  auto ticket = Add("cancelled");
  ASSERT_TRUE(ticket.ok());
  ASSERT_TRUE(Add("other").ok());
  EXPECT_TRUE(scheduler_->Cancel(*ticket));
  EXPECT_THAT(journal_.lines(), ElementsAre("cancelled:CANCELLED"));
  EXPECT_FALSE(scheduler_->Cancel(*ticket)) << "exactly one completion";
  EXPECT_THAT(Finish(), ElementsAre("cancelled:CANCELLED", "held:ran", "other:ran"));
  EXPECT_FALSE(scheduler_->Cancel(*ticket));
}

TEST_F(BatchSchedulerTest, CancelOfARunningTaskDoesNothing) {
  Start();
  auto ticket = Add("held");
  ASSERT_TRUE(ticket.ok());
  gate_.AwaitInside(1);
  EXPECT_FALSE(scheduler_->Cancel(*ticket));
  EXPECT_THAT(Finish(), ElementsAre("held:ran"));
}

TEST_F(BatchSchedulerTest, DrainRefusesNewTasksAndAnswersAcceptedOnes) {
  Start({.max_queue_delay = absl::Hours(1),
         .max_queued_tasks = int64_t{1} << 40,
         .max_queued_tokens = int64_t{1} << 40,
         .max_queued_bytes = int64_t{1} << 40});
  ASSERT_TRUE(Add("accepted").ok());
  std::thread drainer([this] { scheduler_->Drain(); });
  // Draining has begun once a task is refused; what slips in before counts as accepted.
  int accepted = 1;
  absl::Status refused;
  while (refused = Add("probe").status(), refused.ok()) ++accepted;
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  gate_.Open();
  drainer.join();
  int ran = 0;
  for (const std::string& line : journal_.lines()) {
    ran += 1 + static_cast<int>(std::count(line.begin(), line.end(), '+'));
  }
  EXPECT_EQ(ran, accepted) << "a delay does not hold up draining";
  EXPECT_EQ(scheduler_->queued_tasks(), 0);
}

TEST_F(BatchSchedulerTest, SeveralWorkersRunAtOnce) {
  Start({.max_batch_tokens = 1}, 3);
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(Add(name).ok());
  gate_.AwaitInside(3);
  EXPECT_THAT(journal_.lines(), IsEmpty());
  EXPECT_EQ(Finish().size(), 3u);
}

// Producers, cancellers and expiry at once: every accepted task ends exactly once.
TEST_F(BatchSchedulerTest, EveryTaskEndsExactlyOnce) {
  Start({.max_batch_tokens = 8, .max_queued_tasks = 1 << 20}, 2);
  gate_.Open();
  constexpr int kPerThread = 500;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this, i] {
      for (int j = 0; j < kPerThread; ++j) {
        const absl::Duration deadline = j % 5 ? absl::InfiniteDuration() : absl::Microseconds(1);
        auto ticket = Add("t", j % 3, deadline);
        EXPECT_TRUE(ticket.ok());
        if (j % 4 == i) scheduler_->Cancel(*ticket);
        if (j % 7 == 0) clock_.Advance(absl::Microseconds(1));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int ended = 0;
  for (const std::string& line : Finish()) {
    ended += 1 + static_cast<int>(std::count(line.begin(), line.end(), '+'));
  }
  EXPECT_EQ(ended, 4 * kPerThread);
}

TEST_F(BatchSchedulerTest, RunQueuedRunsWhatGatheredOnTheCallersThread) {
  Start();
  gate_.Open();
  for (const char* name : {"a", "b"}) ASSERT_TRUE(AddMine(name).ok());
  EXPECT_EQ(scheduler_->queued_tasks(), 2) << "no worker was woken";
  EXPECT_FALSE(scheduler_->RunQueued(2)) << "nothing is left";
  EXPECT_THAT(journal_.lines(), ElementsAre("a+b:ran")) << "before RunQueued returned";
  EXPECT_FALSE(scheduler_->RunQueued(2));
}

TEST_F(BatchSchedulerTest, RunQueuedTakesTheMostUrgentBatchAndSaysThatMoreIsLeft) {
  Start({.max_batch_tokens = 1});
  gate_.Open();
  ASSERT_TRUE(AddMine("normal").ok());
  ASSERT_TRUE(AddMine("urgent", 1).ok());
  EXPECT_TRUE(scheduler_->RunQueued(1));
  EXPECT_THAT(journal_.lines(), ElementsAre("urgent:ran"));
  EXPECT_FALSE(scheduler_->RunQueued(1));
  EXPECT_THAT(journal_.lines(), ElementsAre("urgent:ran", "normal:ran"));
}

TEST_F(BatchSchedulerTest, RunQueuedLeavesABatchThatCostsTooMuchToAWorker) {
  Start();
  gate_.Open();
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(AddMine(name).ok());
  EXPECT_FALSE(scheduler_->RunQueued(2));
  EXPECT_THAT(AwaitLines(1), ElementsAre("a+b+c:ran")) << "a worker was woken";
  ASSERT_TRUE(AddMine("d", 0, absl::InfiniteDuration(), Task::kUnknownCost).ok());
  EXPECT_FALSE(scheduler_->RunQueued(Task::kUnknownCost - 1));
  EXPECT_THAT(AwaitLines(2), ElementsAre("a+b+c:ran", "d:ran"));
}

TEST_F(BatchSchedulerTest, RunQueuedLeavesTasksToWhoeverHasTheLane) {
  Start();
  Hold();  // the only lane
  ASSERT_TRUE(AddMine("a").ok());
  EXPECT_FALSE(scheduler_->RunQueued(1));
  gate_.Open();
  EXPECT_THAT(AwaitLines(2), ElementsAre("held:ran", "a:ran"));
}

TEST_F(BatchSchedulerTest, WhatComesDuringRunQueuedIsLeftToItsCaller) {
  Start();
  ASSERT_TRUE(AddMine("now").ok());
  std::thread caller([&] { EXPECT_TRUE(scheduler_->RunQueued(1)); });
  gate_.AwaitInside(1);
  ASSERT_TRUE(AddMine("b").ok());
  ASSERT_TRUE(Add("c").ok());
  EXPECT_EQ(scheduler_->queued_tasks(), 2) << "the worker has no lane";
  gate_.Open();
  caller.join();
  EXPECT_FALSE(scheduler_->RunQueued(2));
  EXPECT_THAT(journal_.lines(), ElementsAre("now:ran", "b+c:ran"));
}

TEST_F(BatchSchedulerTest, WhatCouldRunBesideRunQueuedWakesAWorker) {
  Start({.max_batch_tokens = 1}, 2);
  for (const char* name : {"a", "b"}) ASSERT_TRUE(AddMine(name).ok());
  std::thread caller([&] { scheduler_->RunQueued(1); });
  gate_.AwaitInside(2);
  gate_.Open();
  caller.join();
  EXPECT_EQ(AwaitLines(2).size(), 2u);
}

TEST_F(BatchSchedulerTest, WaitingForCompanyIsAWorkersEvenForACaller) {
  Start({.max_queue_delay = absl::Milliseconds(5)});
  gate_.Open();
  ASSERT_TRUE(AddMine("a").ok());
  clock_.Advance(absl::Milliseconds(5));
  EXPECT_FALSE(scheduler_->RunQueued(1));
  scheduler_->Poke();
  EXPECT_THAT(AwaitLines(1), ElementsAre("a:ran"));
}

TEST_F(BatchSchedulerTest, RunQueuedKeepsToAHold) {
  Start();
  gate_.Open();
  scheduler_->HoldUntil(2);
  ASSERT_TRUE(AddMine("a").ok());
  EXPECT_FALSE(scheduler_->RunQueued(2));
  EXPECT_EQ(scheduler_->queued_tasks(), 1);
  ASSERT_TRUE(AddMine("b").ok());
  EXPECT_FALSE(scheduler_->RunQueued(2));
  EXPECT_THAT(journal_.lines(), ElementsAre("a+b:ran"));
}

TEST_F(BatchSchedulerTest, WhatExpiredIsFailedNotRunByRunQueued) {
  Start();
  gate_.Open();
  ASSERT_TRUE(AddMine("late", 0, absl::Hours(1)).ok());
  ASSERT_TRUE(AddMine("in time").ok());
  clock_.Advance(absl::Hours(1));
  EXPECT_FALSE(scheduler_->RunQueued(2));
  EXPECT_THAT(journal_.lines(), ElementsAre("late:DEADLINE_EXCEEDED", "in time:ran"));
}

TEST_F(BatchSchedulerTest, ATaskForItsCallerCanBeCancelledAndIsDrained) {
  Start();
  gate_.Open();
  const auto ticket = AddMine("cancelled");
  ASSERT_TRUE(ticket.ok());
  EXPECT_TRUE(scheduler_->Cancel(*ticket));
  EXPECT_FALSE(scheduler_->RunQueued(1));
  ASSERT_TRUE(AddMine("left").ok());
  EXPECT_THAT(Finish(), ElementsAre("cancelled:CANCELLED", "left:ran"));
  EXPECT_FALSE(scheduler_->RunQueued(1));
  EXPECT_EQ(AddMine("refused").status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(BatchSchedulerTest, DrainWaitsForRunQueued) {
  Start();
  ASSERT_TRUE(AddMine("now").ok());
  std::thread caller([&] { EXPECT_FALSE(scheduler_->RunQueued(1)); });
  gate_.AwaitInside(1);
  std::atomic<bool> drained{false};
  std::thread drain([&] {
    scheduler_->Drain();
    drained = true;
  });
  // Time for a drain that does not wait to return.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(drained);
  gate_.Open();
  drain.join();
  EXPECT_THAT(journal_.lines(), ElementsAre("now:ran"));
  caller.join();
}

// Callers who keep their promise, some tasks for workers, and batches that are now and then too
// dear for callers: every task runs, once, without a drain to shake it loose.
TEST_F(BatchSchedulerTest, CallersAndWorkersShareLanesAndForgetNothing) {
  Start({.max_batch_tokens = 4}, 2);
  gate_.Open();
  constexpr int kCallers = 4, kEach = 500;
  std::vector<std::thread> callers;
  for (int t = 0; t < kCallers; ++t) {
    callers.emplace_back([&] {
      for (int i = 0; i < kEach; ++i) {
        if (i % 5 == 0) {
          ASSERT_TRUE(Add("x").ok());
          continue;
        }
        ASSERT_TRUE(AddMine("x").ok());
        if (i % 3 != 0) continue;
        while (scheduler_->RunQueued(3)) {
        }
      }
      while (scheduler_->RunQueued(3)) {
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  const auto ended = [this] {
    int64_t tasks = 0;
    for (const std::string& line : journal_.lines()) {
      tasks += std::count(line.begin(), line.end(), 'x');
    }
    return tasks;
  };
  const absl::Time start = absl::Now();
  while (ended() < kCallers * kEach && absl::Now() - start < absl::Seconds(20)) {
    std::this_thread::yield();
  }
  EXPECT_EQ(ended(), kCallers * kEach);
}

}  // namespace
}  // namespace awqd::batching
