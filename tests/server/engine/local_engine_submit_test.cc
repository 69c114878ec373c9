// LocalEngine::Submit without memory: whichever allocation fails, the caller gets an error and
// keeps its work, and the next work is answered.
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "tests/server/engine/local_engine_on_cpu.h"
#include "tests/testing/failing_new.h"

namespace awqd::engine {
namespace {

class LocalEngineSubmitTest : public LocalEngineOnCpu {};

TEST_P(LocalEngineSubmitTest, TellsItsCallerWhichAllocationEverFails) {
  Start();
  const std::vector<float> x = RandomRows(2);
  int refused = 0;
  for (bool failed = true; failed; ++refused) {
    ASSERT_LT(refused, 100) << "it never succeeds";
    std::unique_ptr<Work> work = std::make_unique<MatmulWork>(Product(x));
    const Work* const was = work.get();
    std::promise<Answer> promise;
    TaskDone done = [&](const absl::Status& status, Payload bytes, const ExecutionReport& report) {
      promise.set_value({status, std::move(bytes), report});
    };
    absl::StatusOr<TaskHandle> handle;
    {
      const awqd::testing::FailingNew failing(refused + 1);
      handle =
          engine_->Submit(&work, {.deadline = absl::Now() + absl::Minutes(5)}, std::move(done));
      failed = failing.failed();
    }
    if (handle.ok()) {
      EXPECT_FALSE(failed);
      ExpectProduct(promise.get_future().get(), x, canonical_.bias);
      handle->Cancel();  // too late, without effect
    } else {
      EXPECT_EQ(handle.status().code(), absl::StatusCode::kResourceExhausted) << handle.status();
      EXPECT_EQ(work.get(), was);
      EXPECT_EQ(engine_->queued_tasks(), 0);
    }
  }
  EXPECT_GT(refused, 4) << "the handle, the line, the level, the entry, the deadline";
  ExpectProduct(Submit(Product(x)).get(), x, canonical_.bias);
}

INSTANTIATE_TEST_SUITE_P(Memory, LocalEngineSubmitTest, ::testing::Values(true, false),
                         [](const auto& info) { return info.param ? "shared" : "copied"; });

}  // namespace
}  // namespace awqd::engine
