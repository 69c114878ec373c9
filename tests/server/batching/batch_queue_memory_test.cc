// BatchQueue without memory: a Push whose allocation fails leaves nothing behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>

#include "server/batching/batch_queue.h"
#include "tests/server/batching/puppet.h"
#include "tests/testing/failing_new.h"

namespace awqd::batching {
namespace {

using ::testing::ElementsAre;

class BatchQueueMemoryTest : public ::testing::Test {
 protected:
  std::unique_ptr<Task> Make(const std::string& name, int subject, int priority,
                             absl::Duration deadline) {
    auto task = std::make_unique<PuppetTask>(name, &journal_, 3, 10, BatchKey{&subjects_[subject]});
    task->priority = priority;
    task->deadline = now_ + deadline;
    return task;
  }

  // Pushes the task again and again, each time with a later allocation that fails, until it
  // succeeds. Returns the number of failures.
  int PushAtLast(std::unique_ptr<Task> task) {
    for (int failures = 0; failures < 100; ++failures) {
      const Task* const was = task.get();
      const int64_t size = queue_.size(), tokens = queue_.tokens(), bytes = queue_.bytes();
      const absl::Time deadline = queue_.NextExpiry(), batch = queue_.NextBatch(false);
      try {
        const testing::FailingNew failing(failures + 1);
        EXPECT_TRUE(queue_.Push(&task, now_).ok());
        return failures;
      } catch (const std::bad_alloc&) {
      }
      EXPECT_EQ(task.get(), was);
      EXPECT_EQ(queue_.size(), size);
      EXPECT_EQ(queue_.tokens(), tokens);
      EXPECT_EQ(queue_.bytes(), bytes);
      EXPECT_EQ(queue_.NextExpiry(), deadline);
      EXPECT_EQ(queue_.NextBatch(false), batch);
    }
    ADD_FAILURE() << "it never succeeds";
    return 0;
  }

  std::vector<std::string> Pop() {
    std::vector<std::string> names;
    for (const auto& task : queue_.Pop(now_, true).tasks) {
      names.push_back(static_cast<PuppetTask&>(*task).name());
    }
    return names;
  }

  int subjects_[2] = {};
  Journal journal_;
  const absl::Time now_ = absl::FromUnixSeconds(1000);
  BatchQueue queue_{BatchOptions()};
};

TEST_F(BatchQueueMemoryTest, APushThatFailsLeavesTheQueueAsItWas) {
  EXPECT_GE(PushAtLast(Make("a", 0, 0, absl::Seconds(5))), 4) << "line, level, entry, deadline";
  EXPECT_GE(PushAtLast(Make("b", 0, 1, absl::Seconds(3))), 3) << "another level of that line";
  EXPECT_GE(PushAtLast(Make("c", 1, 0, absl::InfiniteDuration())), 3) << "another line";
  EXPECT_GE(PushAtLast(Make("d", 0, 0, absl::InfiniteDuration())), 2) << "of a line that is there";
  EXPECT_EQ(queue_.size(), 4);
  EXPECT_EQ(queue_.NextExpiry(), now_ + absl::Seconds(3));
  EXPECT_THAT(Pop(), ElementsAre("b", "a", "d"));
  EXPECT_THAT(Pop(), ElementsAre("c"));
  EXPECT_EQ(queue_.size(), 0);
  EXPECT_EQ(queue_.tokens(), 0);
  EXPECT_EQ(queue_.NextExpiry(), absl::InfiniteFuture());
}

}  // namespace
}  // namespace awqd::batching
