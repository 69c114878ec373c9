// An engine's annotations of a batch: its id, and its traced calls.
#include "gmock/gmock.h"
#include "tests/server/engine/local_engine_on_cpu.h"

namespace awqd::engine {
namespace {

using ::testing::ElementsAre;

class BatchLinksTest : public LocalEngineOnCpu {
 protected:
  // The answers to works of one token each, for these calls, in one batch.
  std::vector<Answer> Together(const std::vector<obs::SpanRef>& calls) {
    EngineOptions options;
    options.batching.max_queue_delay = absl::Hours(1);  // until all have arrived
    options.batching.max_batch_tokens = static_cast<int64_t>(calls.size());
    Start(options);
    std::vector<std::future<Answer>> futures;
    for (const obs::SpanRef& call : calls) {
      futures.push_back(Submit(Product(RandomRows(1)), {.call = call}));
    }
    std::vector<Answer> out;
    for (std::future<Answer>& future : futures) out.push_back(future.get());
    return out;
  }
};

INSTANTIATE_TEST_SUITE_P(Memory, BatchLinksTest, ::testing::Bool());

TEST_P(BatchLinksTest, TracedWorksHearOfTheTracedCallsOfTheirBatch) {
  const obs::SpanRef a = {1, 2, 3}, b = {4, 5, 6};
  const std::vector<Answer> answers = Together({a, {}, b, a});
  for (const Answer& answer : answers) {
    EXPECT_EQ(answer.report.batch_requests, 4);
    EXPECT_EQ(answer.report.batch_id, answers[0].report.batch_id);
  }
  for (const size_t traced : {0, 2, 3}) {
    ASSERT_NE(answers[traced].report.batch_calls, nullptr);
    EXPECT_THAT(*answers[traced].report.batch_calls, ElementsAre(a, b)) << "each call once";
  }
  EXPECT_EQ(answers[1].report.batch_calls, nullptr) << "its call is not traced";
}

TEST_P(BatchLinksTest, NothingIsGatheredForOneTracedCall) {
  const obs::SpanRef a = {1, 2, 3};
  for (const Answer& answer : Together({a, {}, a})) {
    EXPECT_EQ(answer.report.batch_calls, nullptr);
  }
}

TEST_P(BatchLinksTest, CallsAreBounded) {
  std::vector<obs::SpanRef> calls;
  for (uint64_t i = 1; i <= 100; ++i) calls.push_back({1, 2, i});
  for (const Answer& answer : Together(calls)) {
    ASSERT_NE(answer.report.batch_calls, nullptr);
    EXPECT_EQ(answer.report.batch_calls->size(), obs::kMaxLinks + 1);
  }
}

TEST_P(BatchLinksTest, IdsOfBatchesDiffer) {
  Start();
  const Answer first = Submit(Product(RandomRows(1))).get();
  const Answer second = Submit(Product(RandomRows(1))).get();
  EXPECT_GT(first.report.batch_id, 0);
  EXPECT_GT(second.report.batch_id, first.report.batch_id);
}

}  // namespace
}  // namespace awqd::engine
