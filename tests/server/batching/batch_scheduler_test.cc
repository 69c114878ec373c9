// BatchScheduler: its workers, its reaper, delays, deadlines, cancelling and draining.
#include "server/batching/batch_scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "tests/server/batching/batch_scheduler_fixture.h"

namespace awqd::batching {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST_F(BatchSchedulerTest, AnIdleWorkerStartsAtOnceAndABusyOneLetsTasksGather) {
  Start();
  Hold();
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(Add(name).ok());
  EXPECT_EQ(scheduler_->queued_tasks(), 3);
  EXPECT_THAT(Finish(), ElementsAre("held:ran", "a+b+c:ran"));
  EXPECT_EQ(scheduler_->queued_tasks(), 0);
}

TEST_F(BatchSchedulerTest, CountsWhatWasNotRun) {
  Start({.max_queued_tasks = 2});
  Hold();
  const absl::StatusOr<Ticket> cancelled = Add("cancelled");
  ASSERT_TRUE(Add("expired", 0, absl::Milliseconds(1)).ok());
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(absl::IsResourceExhausted(Add("refused").status()));
  EXPECT_TRUE(scheduler_->Cancel(*cancelled));
  EXPECT_FALSE(scheduler_->Cancel(*cancelled)) << "and counts nothing";
  clock_.Advance(absl::Milliseconds(1));
  scheduler_->Poke();
  AwaitLines(2);
  Finish();
  EXPECT_TRUE(absl::IsUnavailable(Add("late").status()));
  const SchedulerCounts counts = scheduler_->counts();
  EXPECT_EQ(counts.refused.full, 3);
  EXPECT_EQ(counts.cancelled, 1);
  EXPECT_EQ(counts.expired, 1);
  EXPECT_EQ(counts.refused_draining, 1);
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
  // Not poked: the reaper knows of the earlier deadline and waits a millisecond of real time for
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
  // Draining has begun once a task is refused; earlier tasks count as accepted.
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

}  // namespace
}  // namespace awqd::batching
