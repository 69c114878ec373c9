// BatchQueue: the tasks of a batch, their order, and refusals.
#include "server/batching/batch_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "tests/server/batching/puppet.h"

namespace awqd::batching {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class BatchQueueTest : public ::testing::Test {
 protected:
  struct Spec {
    int64_t tokens = 1;
    int priority = 0;
    int subject = 0;  // index into subjects_; -1: never merges
    absl::Duration deadline = absl::InfiniteDuration();
    int64_t bytes = 1;
  };

  absl::StatusOr<Ticket> Push(const std::string& name, const Spec& spec) {
    BatchKey key;
    if (spec.subject >= 0) key.subject = &subjects_[spec.subject];
    std::unique_ptr<Task> task =
        std::make_unique<PuppetTask>(name, &journal_, spec.tokens, spec.bytes, key);
    task->priority = spec.priority;
    task->deadline = now_ + spec.deadline;
    auto ticket = queue_->Push(&task, now_);
    EXPECT_EQ(task == nullptr, ticket.ok()) << "ownership moves only on OK";
    return ticket;
  }

  std::vector<std::string> Pop(bool hurry = false) {
    std::vector<std::string> names;
    int64_t tokens = 0;
    const Batch batch = queue_->Pop(now_, hurry);
    for (const auto& task : batch.tasks) {
      names.push_back(static_cast<PuppetTask&>(*task).name());
      tokens += task->tokens();
    }
    EXPECT_EQ(tokens, batch.tokens);
    return names;
  }

  void Use(const BatchOptions& options) { queue_ = std::make_unique<BatchQueue>(options); }

  int subjects_[4] = {};
  Journal journal_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  std::unique_ptr<BatchQueue> queue_ = std::make_unique<BatchQueue>(BatchOptions());
};

TEST_F(BatchQueueTest, EmptyQueueHasNothingToGive) {
  EXPECT_THAT(Pop(), IsEmpty());
  EXPECT_EQ(queue_->NextBatch(false), absl::InfiniteFuture());
  EXPECT_EQ(queue_->NextExpiry(), absl::InfiniteFuture());
  EXPECT_EQ(queue_->Remove(1), nullptr);
}

TEST_F(BatchQueueTest, MergesEqualKeysInOrderOfArrival) {
  ASSERT_TRUE(Push("a0", {.subject = 0}).ok());
  ASSERT_TRUE(Push("b0", {.subject = 1}).ok());
  ASSERT_TRUE(Push("a1", {.subject = 0}).ok());
  ASSERT_TRUE(Push("alone", {.subject = -1}).ok());
  ASSERT_TRUE(Push("a2", {.subject = 0}).ok());
  EXPECT_THAT(Pop(), ElementsAre("a0", "a1", "a2"));
  EXPECT_THAT(Pop(), ElementsAre("b0"));
  EXPECT_THAT(Pop(), ElementsAre("alone"));
  EXPECT_EQ(queue_->size(), 0);
  EXPECT_EQ(queue_->tokens(), 0);
  EXPECT_EQ(queue_->bytes(), 0);
}

TEST_F(BatchQueueTest, TasksWithoutSubjectNeverMerge) {
  ASSERT_TRUE(Push("a", {.subject = -1}).ok());
  ASSERT_TRUE(Push("b", {.subject = -1}).ok());
  EXPECT_THAT(Pop(), ElementsAre("a"));
  EXPECT_THAT(Pop(), ElementsAre("b"));
}

TEST_F(BatchQueueTest, ATaskThatDoesNotFitClosesTheBatchAndGoesFirstNextTime) {
  Use({.max_batch_tokens = 10});
  ASSERT_TRUE(Push("six", {.tokens = 6}).ok());
  ASSERT_TRUE(Push("five", {.tokens = 5}).ok());
  ASSERT_TRUE(Push("one", {.tokens = 1}).ok());  // it would fit, but must not overtake
  EXPECT_THAT(Pop(), ElementsAre("six"));
  EXPECT_THAT(Pop(), ElementsAre("five", "one"));
}

TEST_F(BatchQueueTest, FillsABatchExactly) {
  Use({.max_batch_tokens = 4});
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(Push(absl::StrCat(i), {}).ok());
  EXPECT_THAT(Pop(), ElementsAre("0", "1", "2", "3"));
  EXPECT_THAT(Pop(), ElementsAre("4", "5"));
}

TEST_F(BatchQueueTest, ATaskLargerThanABatchRunsAlone) {
  Use({.max_batch_tokens = 4});
  ASSERT_TRUE(Push("large", {.tokens = 100}).ok());
  ASSERT_TRUE(Push("small", {}).ok());
  EXPECT_THAT(Pop(), ElementsAre("large"));
  EXPECT_THAT(Pop(), ElementsAre("small"));
}

TEST_F(BatchQueueTest, TasksOfNoTokensAreBatchedToo) {
  ASSERT_TRUE(Push("none", {.tokens = 0}).ok());
  ASSERT_TRUE(Push("one", {.tokens = 1}).ok());
  EXPECT_THAT(Pop(), ElementsAre("none", "one"));
}

TEST_F(BatchQueueTest, UrgentFirstWithinAndAcrossGroups) {
  ASSERT_TRUE(Push("a-normal", {.priority = 0, .subject = 0}).ok());
  ASSERT_TRUE(Push("b-low", {.priority = -1, .subject = 1}).ok());
  ASSERT_TRUE(Push("b-high", {.priority = 2, .subject = 1}).ok());
  ASSERT_TRUE(Push("a-high", {.priority = 2, .subject = 0}).ok());
  EXPECT_THAT(Pop(), ElementsAre("b-high", "b-low"));
  EXPECT_THAT(Pop(), ElementsAre("a-high", "a-normal"));
}

TEST_F(BatchQueueTest, AStarvingTaskGoesBeforeEveryPriority) {
  Use({.max_batch_tokens = 2, .max_starvation = absl::Milliseconds(100)});
  ASSERT_TRUE(Push("patient", {.priority = -5}).ok());
  now_ += absl::Milliseconds(99);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Push(absl::StrCat("urgent", i), {.priority = 9}).ok());
  EXPECT_THAT(Pop(), ElementsAre("urgent0", "urgent1"));
  now_ += absl::Milliseconds(1);
  EXPECT_THAT(Pop(), ElementsAre("patient", "urgent2"));
}

TEST_F(BatchQueueTest, TheLongestStarvingOfTwoGroupsGoesFirst) {
  Use({.max_starvation = absl::Milliseconds(10)});
  ASSERT_TRUE(Push("first", {.priority = -1, .subject = 0}).ok());
  ASSERT_TRUE(Push("second", {.priority = 7, .subject = 1}).ok());
  now_ += absl::Milliseconds(20);
  EXPECT_THAT(Pop(), ElementsAre("first"));
  EXPECT_THAT(Pop(), ElementsAre("second"));
}

TEST_F(BatchQueueTest, WithoutDelayABatchIsReadyAtOnce) {
  ASSERT_TRUE(Push("a", {}).ok());
  EXPECT_LE(queue_->NextBatch(false), now_);
}

TEST_F(BatchQueueTest, DelayIsTheAgeOfTheOldestAndEndsWhenFull) {
  Use({.max_batch_tokens = 3, .max_queue_delay = absl::Milliseconds(5)});
  ASSERT_TRUE(Push("a", {}).ok());
  const absl::Time ready = now_ + absl::Milliseconds(5);
  now_ += absl::Milliseconds(3);
  ASSERT_TRUE(Push("b", {}).ok());
  EXPECT_EQ(queue_->NextBatch(false), ready) << "a later task does not restart the wait";
  EXPECT_THAT(Pop(), IsEmpty());
  ASSERT_TRUE(Push("c", {}).ok());
  EXPECT_LE(queue_->NextBatch(false), now_) << "full";
  EXPECT_THAT(Pop(), ElementsAre("a", "b", "c"));
}

TEST_F(BatchQueueTest, DelayExpires) {
  Use({.max_queue_delay = absl::Milliseconds(5)});
  ASSERT_TRUE(Push("a", {}).ok());
  now_ += absl::Milliseconds(5);
  EXPECT_THAT(Pop(), ElementsAre("a"));
}

TEST_F(BatchQueueTest, DelaySparesWhatCannotMergeAndDraining) {
  Use({.max_queue_delay = absl::Seconds(5)});
  ASSERT_TRUE(Push("alone", {.subject = -1}).ok());
  ASSERT_TRUE(Push("waits", {.subject = 0}).ok());
  EXPECT_THAT(Pop(), ElementsAre("alone"));
  EXPECT_THAT(Pop(), IsEmpty());
  EXPECT_THAT(Pop(/*hurry=*/true), ElementsAre("waits"));
}

TEST_F(BatchQueueTest, RefusesExactlyTheExcessAndCountsOnlyWhatItTook) {
  Use({.max_queued_tasks = 2});
  ASSERT_TRUE(Push("a", {}).ok());
  ASSERT_TRUE(Push("b", {}).ok());
  for (int i = 0; i < 3; ++i) {
    const absl::Status refused = Push("excess", {}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("2 requests queued"));
  }
  EXPECT_EQ(queue_->size(), 2);
  EXPECT_THAT(Pop(), ElementsAre("a", "b"));
  EXPECT_TRUE(Push("again", {}).ok());
}

TEST_F(BatchQueueTest, BoundsTokensAndBytesButLetsALoneLargeTaskIn) {
  Use({.max_queued_tokens = 10, .max_queued_bytes = 100});
  ASSERT_TRUE(Push("large", {.tokens = 50, .bytes = 1000}).ok());
  EXPECT_THAT(std::string(Push("t", {.tokens = 1, .bytes = 0}).status().message()),
              HasSubstr("50 tokens queued and 1 more asked for, the limit is 10"));
  EXPECT_THAT(std::string(Push("b", {.tokens = 0, .bytes = 1}).status().message()),
              HasSubstr("tokens"));
  EXPECT_THAT(Pop(), ElementsAre("large"));
  ASSERT_TRUE(Push("small", {.tokens = 5, .bytes = 90}).ok());
  EXPECT_THAT(std::string(Push("b", {.tokens = 5, .bytes = 20}).status().message()),
              HasSubstr("90 bytes queued and 20 more asked for, the limit is 100"));
}

TEST_F(BatchQueueTest, ExpiryTakesWhatIsDueAndNothingElse) {
  ASSERT_TRUE(Push("soon", {.deadline = absl::Milliseconds(5)}).ok());
  ASSERT_TRUE(Push("later", {.deadline = absl::Milliseconds(50)}).ok());
  ASSERT_TRUE(Push("never", {}).ok());
  EXPECT_EQ(queue_->NextExpiry(), now_ + absl::Milliseconds(5));
  EXPECT_THAT(queue_->TakeExpired(now_), IsEmpty());
  now_ += absl::Milliseconds(5);
  const auto expired = queue_->TakeExpired(now_);
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(static_cast<PuppetTask&>(*expired[0]).name(), "soon");
  EXPECT_EQ(queue_->size(), 2);
  EXPECT_THAT(Pop(), ElementsAre("later", "never"));
  EXPECT_EQ(queue_->NextExpiry(), absl::InfiniteFuture());
}

TEST_F(BatchQueueTest, RemoveTakesOnceAndLeavesTheRest) {
  ASSERT_TRUE(Push("a", {}).ok());
  const auto ticket = Push("b", {.deadline = absl::Seconds(1)});
  ASSERT_TRUE(ticket.ok());
  ASSERT_TRUE(Push("c", {}).ok());
  EXPECT_NE(queue_->Remove(*ticket), nullptr);
  EXPECT_EQ(queue_->Remove(*ticket), nullptr);
  EXPECT_EQ(queue_->NextExpiry(), absl::InfiniteFuture());
  EXPECT_THAT(Pop(), ElementsAre("a", "c"));
}

// In any order of operations, no task is lost, doubled or miscounted.
TEST_F(BatchQueueTest, RandomOperationsKeepTheBooks) {
  Use({.max_batch_tokens = 16, .max_queued_tasks = 40, .max_queued_tokens = 200});
  std::mt19937 random(7);
  std::vector<Ticket> tickets;
  int64_t in = 0, out = 0;
  for (int step = 0; step < 20000; ++step) {
    now_ += absl::Microseconds(random() % 1000);
    switch (random() % 4) {
      case 0:
      case 1: {
        Spec spec{.tokens = static_cast<int64_t>(random() % 20),
                  .priority = static_cast<int>(random() % 3),
                  .subject = static_cast<int>(random() % 5) - 1,
                  .bytes = static_cast<int64_t>(random() % 9)};
        if (random() % 2) spec.deadline = absl::Microseconds(random() % 5000);
        if (auto ticket = Push("t", spec); ticket.ok()) {
          tickets.push_back(*ticket);
          ++in;
        }
        break;
      }
      case 2:
        if (!tickets.empty() && queue_->Remove(tickets[random() % tickets.size()])) ++out;
        break;
      case 3:
        out += random() % 2 ? Pop().size() : queue_->TakeExpired(now_).size();
        break;
    }
    ASSERT_EQ(queue_->size(), in - out);
    ASSERT_LE(queue_->size(), 40);
  }
  while (queue_->size() > 0) out += Pop(true).size();
  EXPECT_EQ(in, out);
  EXPECT_EQ(queue_->tokens(), 0);
  EXPECT_EQ(queue_->bytes(), 0);
}

}  // namespace
}  // namespace awqd::batching
