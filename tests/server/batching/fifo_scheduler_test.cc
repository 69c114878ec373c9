// FifoScheduler: order, bounds, deadlines, cancellation, drain; with a clock that stands still.
#include "server/batching/fifo_scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "absl/status/statusor.h"
#include "tests/server/batching/puppet.h"
#include "tests/testing/fake_clock.h"

namespace awqd {
namespace {

using ::awqd::testing::FakeClock;
using ::awqd::testing::Gate;
using ::awqd::testing::Journal;
using ::awqd::testing::PuppetTask;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FifoSchedulerTest : public ::testing::Test {
 protected:
  void Start(const FifoOptions& options = {}) {
    scheduler_ = std::make_unique<FifoScheduler>(
        options,
        [this](int, std::vector<std::unique_ptr<Task>> batch) {
          gate_.Pass();
          for (auto& task : batch) static_cast<PuppetTask&>(*task).Ran();
        },
        &clock_);
  }

  // Schedules a task; the flag is for cancelling it.
  absl::StatusOr<CancelFlag> Add(const std::string& name, int priority = 0,
                                 absl::Duration deadline = absl::InfiniteDuration(),
                                 int64_t bytes = 1) {
    std::unique_ptr<Task> task = std::make_unique<PuppetTask>(name, &journal_, 1, bytes);
    task->priority = priority;
    task->deadline = clock_.Now() + deadline;
    CancelFlag flag = task->cancel_flag();
    const absl::Status status = scheduler_->Schedule(&task);
    EXPECT_EQ(task == nullptr, status.ok()) << "ownership moves only on OK";
    if (!status.ok()) return status;
    return flag;
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

  FakeClock clock_;
  Gate gate_;
  Journal journal_;
  std::unique_ptr<FifoScheduler> scheduler_;
};

TEST_F(FifoSchedulerTest, RunsInOrderOfArrival) {
  Start();
  Hold();
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(Add(name).ok());
  EXPECT_EQ(scheduler_->queued_tasks(), 3);
  EXPECT_THAT(Finish(), ElementsAre("held:ran", "a:ran", "b:ran", "c:ran"));
  EXPECT_EQ(scheduler_->queued_tasks(), 0);
}

TEST_F(FifoSchedulerTest, UrgentFirstAndFifoWithinALevel) {
  Start();
  Hold();
  ASSERT_TRUE(Add("low", -1).ok());
  ASSERT_TRUE(Add("normal1").ok());
  ASSERT_TRUE(Add("high1", 5).ok());
  ASSERT_TRUE(Add("normal2").ok());
  ASSERT_TRUE(Add("high2", 5).ok());
  EXPECT_THAT(Finish(), ElementsAre("held:ran", "high1:ran", "high2:ran", "normal1:ran",
                                    "normal2:ran", "low:ran"));
}

TEST_F(FifoSchedulerTest, RefusesExactlyTheExcessAndKeepsCounting) {
  FifoOptions options;
  options.max_queued_tasks = 2;
  Start(options);
  Hold();
  ASSERT_TRUE(Add("a").ok());
  ASSERT_TRUE(Add("b").ok());
  for (int i = 0; i < 3; ++i) {
    const absl::Status refused = Add("excess").status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("2 requests queued, the limit is 2"));
  }
  EXPECT_EQ(scheduler_->queued_tasks(), 2);
  EXPECT_THAT(Finish(), ElementsAre("held:ran", "a:ran", "b:ran"));
}

TEST_F(FifoSchedulerTest, BoundsQueuedBytesButLetsALoneLargeTaskIn) {
  FifoOptions options;
  options.max_queued_bytes = 100;
  Start(options);
  Hold();
  ASSERT_TRUE(Add("large", 0, absl::InfiniteDuration(), 1000).ok());
  EXPECT_EQ(Add("next", 0, absl::InfiniteDuration(), 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Finish(), ElementsAre("held:ran", "large:ran"));
}

TEST_F(FifoSchedulerTest, ExpiredTaskNeverRuns) {
  Start();
  Hold();
  ASSERT_TRUE(Add("short", 0, absl::Milliseconds(5)).ok());
  ASSERT_TRUE(Add("long", 0, absl::Milliseconds(50)).ok());
  clock_.Advance(absl::Milliseconds(10));
  EXPECT_THAT(Finish(), ElementsAre("held:ran", "short:DEADLINE_EXCEEDED", "long:ran"));
}

TEST_F(FifoSchedulerTest, CancelledTaskNeverRuns) {
  Start();
  Hold();
  auto flag = Add("cancelled");
  ASSERT_TRUE(flag.ok());
  ASSERT_TRUE(Add("other").ok());
  (*flag)->store(true);
  EXPECT_THAT(Finish(), ElementsAre("held:ran", "cancelled:CANCELLED", "other:ran"));
}

TEST_F(FifoSchedulerTest, DrainRefusesNewTasksAndAnswersAcceptedOnes) {
  Start();
  Hold();
  ASSERT_TRUE(Add("accepted").ok());
  std::thread drainer([this] { scheduler_->Drain(); });
  // Drain has begun once a task is refused; tasks that slip in before count as accepted.
  int accepted = 0;
  while (Add("probe").ok()) ++accepted;
  EXPECT_EQ(Add("late").status().code(), absl::StatusCode::kUnavailable);
  gate_.Open();
  drainer.join();
  EXPECT_EQ(journal_.lines().size(), 2u + accepted);
  EXPECT_EQ(scheduler_->queued_tasks(), 0);
}

TEST_F(FifoSchedulerTest, SeveralWorkersRunAtOnce) {
  FifoOptions options;
  options.workers = 3;
  Start(options);
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(Add(name).ok());
  gate_.AwaitInside(3);
  EXPECT_THAT(journal_.lines(), IsEmpty());
  EXPECT_EQ(Finish().size(), 3u);
}

TEST_F(FifoSchedulerTest, ManyProducersLoseNothing) {
  FifoOptions options;
  options.workers = 2;
  options.max_queued_tasks = 1 << 20;
  Start(options);
  gate_.Open();
  std::vector<std::thread> producers;
  for (int i = 0; i < 4; ++i) {
    producers.emplace_back([this] {
      for (int j = 0; j < 500; ++j) EXPECT_TRUE(Add("t", j % 3).ok());
    });
  }
  for (std::thread& producer : producers) producer.join();
  EXPECT_EQ(Finish().size(), 2000u);
}

}  // namespace
}  // namespace awqd
