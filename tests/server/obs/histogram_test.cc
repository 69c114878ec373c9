// Histograms: buckets of values, differences of two states, quantiles.
#include "kernels/base/histogram.h"

#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/obs/snapshot.h"

namespace awqd::obs {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kBounds[] = {10, 20, 40};

TEST(Histogram, ABoundBelongsToItsOwnBucket) {
  Histogram histogram(kBounds);
  for (const int64_t value : {-1, 0, 10, 11, 20, 21, 40, 41, 1000}) histogram.Observe(value);
  const HistogramData data = histogram.data();
  EXPECT_THAT(data.counts, ElementsAre(3, 2, 2, 2));
  EXPECT_EQ(data.sum, 1142);
  EXPECT_EQ(data.total(), 9);
}

TEST(Histogram, LosesNothingBetweenThreads) {
  Histogram histogram(kBounds);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&histogram] {
      for (int value = 0; value < 10000; ++value) histogram.Observe(value % 50);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(histogram.data().total(), 40000);
  EXPECT_EQ(histogram.data().sum, 40000 / 50 * (49 * 50 / 2));
}

TEST(Histogram, AddsAndSubtracts) {
  Histogram histogram(kBounds);
  histogram.Observe(5);
  const HistogramData before = histogram.data();
  histogram.Observe(15);
  histogram.Observe(50);
  const HistogramData between = histogram.data().Since(before);
  EXPECT_THAT(between.counts, ElementsAre(0, 1, 0, 1));
  EXPECT_EQ(between.sum, 65);
  HistogramData all;  // without counts yet
  all.Merge(between);
  all.Merge(before);
  EXPECT_THAT(all.counts, ElementsAre(1, 1, 0, 1));
  EXPECT_EQ(all.sum, 70);
}

TEST(Histogram, QuantilesLieWithinTheirBuckets) {
  Histogram histogram(kBounds);
  EXPECT_EQ(histogram.data().Quantile(0.5), 0);
  for (int i = 0; i < 100; ++i) histogram.Observe(15);
  EXPECT_DOUBLE_EQ(histogram.data().Quantile(0.5), 15);
  EXPECT_DOUBLE_EQ(histogram.data().Quantile(1), 20);
  for (int i = 0; i < 900; ++i) histogram.Observe(1000);
  EXPECT_DOUBLE_EQ(histogram.data().Quantile(0.99), 40) << "no more is known than the last bound";
}

TEST(Process, IsThisOne) {
  const ProcessStats process = ReadProcess();
  EXPECT_GT(process.resident_bytes, 1 << 20);
  EXPECT_GE(process.virtual_bytes, process.resident_bytes);
  EXPECT_GE(process.open_fds, 3);
  EXPECT_GE(process.max_fds, process.open_fds);
  EXPECT_GE(process.threads, 1);
  EXPECT_LT(absl::Now() - process.started, absl::Hours(1));
  EXPECT_GT(absl::Now() - process.started, absl::Seconds(-2));
}

}  // namespace
}  // namespace awqd::obs
