// Statistics of an engine: its batches, and the models that they count for.
#include "server/engine/statistics.h"

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "tests/server/engine/local_engine_on_cpu.h"

namespace awqd::engine {
namespace {

class StatisticsTest : public LocalEngineOnCpu {};

INSTANTIATE_TEST_SUITE_P(Memory, StatisticsTest, ::testing::Bool());

TEST_P(StatisticsTest, CountsBatchesRequestsTokensAndKernels) {
  Start();
  const std::vector<float> x = RandomRows(3);
  std::string kernel;
  for (int i = 0; i < 5; ++i) {
    const Answer answer = Submit(Product(x)).get();
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    kernel = answer.report.kernel;
  }
  const std::vector<obs::DeviceStats> stats = engine_->stats();
  ASSERT_EQ(stats.size(), 1u);
  EXPECT_EQ(stats[0].id, device_->info().id);
  EXPECT_EQ(stats[0].batch_requests.sum, 5);
  EXPECT_EQ(stats[0].batch_tokens.sum, 15);
  EXPECT_EQ(stats[0].queue_ns.total(), 5);
  EXPECT_EQ(stats[0].compute_ns.total(), stats[0].batch_tokens.total());
  EXPECT_EQ(stats[0].batches_failed, 0);
  ASSERT_EQ(stats[0].kernels.size(), 1u);
  EXPECT_EQ(stats[0].kernels[0].kernel, kernel);
  EXPECT_EQ(stats[0].kernels[0].batches, stats[0].batch_tokens.total());
}

// A batch in the form that the engine gives to its meter.
batching::Batch Products(const std::shared_ptr<const model::PlacedWeight>& weight, int requests) {
  batching::Batch batch = {.tokens = 2 * requests};
  for (int i = 0; i < requests; ++i) {
    auto work = std::make_unique<MatmulWork>();
    work->weight = weight;
    work->rows = 2;
    work->enqueued = absl::FromUnixSeconds(99);
    batch.tasks.push_back(std::move(work));
  }
  return batch;
}

TEST_P(StatisticsTest, CountsForTheModel) {
  model::PlacedWeight weight = *placed_;
  weight.statistics = std::make_shared<model::ModelStatistics>();
  const auto shared = std::make_shared<const model::PlacedWeight>(weight);
  StatisticsRecorder statistics;
  const absl::Time start = absl::FromUnixSeconds(100);
  const ExecutionReport report = {.kernel = "a", .compute_us = 2, .input_ns = 500};
  statistics.RecordBatch(Products(shared, 3), start, absl::OkStatus(), report);
  statistics.RecordBatch(Products(shared, 1), start, absl::InternalError("no"), report);
  statistics.RecordBatch(Products(placed_, 1), start, absl::OkStatus(), report);  // of no model
  EXPECT_EQ(weight.statistics->requests, 3);
  EXPECT_EQ(weight.statistics->failed, 1);
  EXPECT_EQ(weight.statistics->tokens, 8);
  EXPECT_EQ(weight.statistics->queue_ns, 4'000'000'000);
  EXPECT_EQ(weight.statistics->batches, 1) << "the other was not computed";
  EXPECT_EQ(weight.statistics->input_ns, 3 * 500) << "each request has the time of its batch";
  EXPECT_EQ(weight.statistics->compute_ns, 3 * 1500);
  obs::DeviceStats stats;
  statistics.FillStats(&stats);
  EXPECT_EQ(stats.merged_requests, 3);
  EXPECT_EQ(stats.batches_failed, 1);
  EXPECT_EQ(stats.kernels[0].batches, 3);
  EXPECT_EQ(stats.kernels[0].compute, absl::Microseconds(6));
}

TEST_P(StatisticsTest, TheEngineCountsTimesOfItsBatches) {
  Start();
  model::PlacedWeight weight = *placed_;
  weight.statistics = std::make_shared<model::ModelStatistics>();
  MatmulWork work = Product(RandomRows(3));
  work.weight = std::make_shared<const model::PlacedWeight>(weight);
  ASSERT_TRUE(Submit(std::move(work)).get().status.ok());
  engine_->Drain();  // answers are counted once they were given
  const std::vector<model::BatchSizeStatistics> sizes = weight.statistics->sizes.Seen();
  ASSERT_EQ(sizes.size(), 1u);
  EXPECT_EQ(sizes[0].tokens, 3);
  EXPECT_EQ(sizes[0].batches, 1);
  EXPECT_EQ(sizes[0].answered, 1);
  EXPECT_GT(sizes[0].times.output_ns, 0);
  EXPECT_EQ(sizes[0].times.input_ns > 0, !GetParam()) << "in place where memory is shared";
  EXPECT_EQ(weight.statistics->answered, 1);
  EXPECT_EQ(weight.statistics->output_ns, sizes[0].times.output_ns);
}

TEST(BatchSizes, AreExactUpTo64AndPowersOfTwoAbove) {
  model::BatchSizes sizes;
  for (const int64_t tokens : {0, 1, 63, 64, 65, 128, 129, 1 << 20})
    sizes.AddComputed(tokens, 1, 2);
  std::vector<std::pair<int64_t, int64_t>> seen;
  for (const model::BatchSizeStatistics& size : sizes.Seen()) {
    seen.emplace_back(size.tokens, size.batches);
    EXPECT_EQ(size.times.input_ns, size.batches);
    EXPECT_EQ(size.times.compute_ns, 2 * size.batches);
  }
  EXPECT_THAT(seen, ::testing::ElementsAre(std::pair(0, 1), std::pair(1, 1), std::pair(63, 1),
                                           std::pair(64, 1), std::pair(128, 2), std::pair(256, 1),
                                           std::pair(1 << 20, 1)));
  sizes.AddComputed(int64_t{1} << 40, 0, 0);
  EXPECT_EQ(sizes.Seen().back().tokens, int64_t{1} << 32) << "as large as it gets";
}

TEST_P(StatisticsTest, TakesBoundedMemoryForNamesOfKernels) {
  StatisticsRecorder statistics;
  for (int i = 0; i < 10000; ++i) {
    statistics.RecordBatch(Products(placed_, 1), absl::Now(), absl::OkStatus(),
                           {.kernel = std::to_string(i)});
  }
  obs::DeviceStats stats;
  statistics.FillStats(&stats);
  EXPECT_LE(stats.kernels.size(), 257u);
}

}  // namespace
}  // namespace awqd::engine
