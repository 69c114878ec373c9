// BatchScheduler::RunQueued: tasks that their callers run, beside the workers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <typeinfo>
#include <vector>

#include "absl/time/clock.h"
#include "server/batching/batch_scheduler.h"
#include "tests/server/batching/batch_scheduler_fixture.h"

namespace awqd::batching {
namespace {

using ::testing::ElementsAre;

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

TEST_F(BatchSchedulerTest, RunQueuedAloneLeavesCompanyToTheWorkers) {
  Start({}, 2);
  gate_.Open();
  ASSERT_TRUE(AddMine("a").ok());
  EXPECT_FALSE(scheduler_->RunQueued(2, /*alone=*/true));
  EXPECT_THAT(journal_.lines(), ElementsAre("a:ran")) << "it was alone";
  for (const char* name : {"b", "c"}) ASSERT_TRUE(AddMine(name).ok());
  EXPECT_FALSE(scheduler_->RunQueued(2, /*alone=*/true));
  EXPECT_THAT(AwaitLines(2), ElementsAre("a:ran", "b+c:ran")) << "a worker was woken";
}

TEST_F(BatchSchedulerTest, RunQueuedAloneLeavesWhatTakesLongToAWorker) {
  Start({}, 2);
  const RunKey key = {.operation = &typeid(PuppetTask)};
  scheduler_->RecordRun(key, 1, absl::Milliseconds(5));
  ASSERT_TRUE(AddMine("a", 0, absl::InfiniteDuration(), 1, key).ok());
  EXPECT_FALSE(scheduler_->RunQueued(1, /*alone=*/true)) << "it does not wait at the gate";
  gate_.AwaitInside(1);
  gate_.Open();
  EXPECT_THAT(AwaitLines(1), ElementsAre("a:ran"));
}

TEST_F(BatchSchedulerTest, RunQueuedAloneRunsNothingBesideABusyLane) {
  Start({}, 2);
  Hold();
  ASSERT_TRUE(AddMine("a").ok());
  EXPECT_FALSE(scheduler_->RunQueued(1, /*alone=*/true)) << "it does not wait at the gate";
  gate_.AwaitInside(2);
  gate_.Open();
  EXPECT_EQ(AwaitLines(2).size(), 2);
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
  // Time enough for a drain that does not wait to return.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(drained);
  gate_.Open();
  drain.join();
  EXPECT_THAT(journal_.lines(), ElementsAre("now:ran"));
  caller.join();
}

// Callers that run their tasks, some tasks for workers, and batches that are sometimes too
// expensive for callers: every task runs once, without a drain that would release it.
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
