// BatchSchedulerTest: a scheduler with a stopped clock and an executor that the test holds.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/batching/batch_scheduler.h"
#include "tests/server/batching/puppet.h"
#include "tests/testing/fake_clock.h"

namespace awqd::batching {

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
        [this] { return clock_.Now(); });
    // A worker that is not asleep yet would take a task that its caller should run.
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

  // A task that its caller runs, with RunQueued.
  absl::StatusOr<Ticket> AddMine(const std::string& name, int priority = 0,
                                 absl::Duration deadline = absl::InfiniteDuration(),
                                 int64_t cost = 1, const RunKey& run_key = {}) {
    auto task = std::make_unique<PuppetTask>(name, &journal_, 1, 1, BatchKey{&subject_, 0});
    task->set_cost(cost);
    task->set_run_key(run_key);
    task->priority = priority;
    task->deadline = clock_.Now() + deadline;
    std::unique_ptr<Task> owned = std::move(task);
    return scheduler_->Schedule(&owned, Runner::kCaller);
  }

  // Occupies the only worker, so that later tasks stay queued.
  void Hold() {
    ASSERT_TRUE(Add("held").ok());
    gate_.AwaitInside(1);
  }

  std::vector<std::string> Finish() {
    gate_.Open();
    scheduler_->Drain();
    return journal_.lines();
  }

  // Waits until the reaper has written `count` lines.
  std::vector<std::string> AwaitLines(size_t count) {
    while (journal_.lines().size() < count) std::this_thread::yield();
    return journal_.lines();
  }

  int subject_ = 0;
  awqd::testing::FakeClock clock_;
  Gate gate_;
  Journal journal_;
  std::unique_ptr<BatchScheduler> scheduler_;
};

}  // namespace awqd::batching
