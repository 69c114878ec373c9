// RunTimes: curves from runs, and what is said of loads between and beyond them.
#include "server/batching/run_times.h"

#include <gtest/gtest.h>

namespace awqd::batching {
namespace {

class RunTimesTest : public ::testing::Test {
 protected:
  void Record(int64_t load, absl::Duration took, int times = 1) {
    for (int i = 0; i < times; ++i) times_.Record(key_, load, took, now_);
  }
  double ExpectMs(int64_t load) const {
    return absl::ToDoubleMilliseconds(times_.Expect(key_, load, now_).usual);
  }

  const int operation_ = 0;
  const RunKey key_ = {.operation = &operation_, .shape = 1};
  absl::Time now_ = absl::FromUnixSeconds(1000);
  RunTimes times_;
};

TEST_F(RunTimesTest, NothingIsExpectedOfWhatNeverRan) {
  Record(64, absl::Milliseconds(4));
  EXPECT_EQ(times_.Expect({.operation = &operation_, .shape = 2}, 64, now_).usual,
            absl::ZeroDuration());
  times_.Record({}, 64, absl::Seconds(1), now_);
  EXPECT_EQ(times_.Expect({}, 64, now_).usual, absl::ZeroDuration());
}

TEST_F(RunTimesTest, LinesBetweenPointsAndBeyond) {
  Record(64, absl::Milliseconds(4));
  Record(256, absl::Milliseconds(10));
  EXPECT_NEAR(ExpectMs(64), 4, 1e-3);
  EXPECT_NEAR(ExpectMs(160), 7, 1e-3);
  EXPECT_NEAR(ExpectMs(512), 20, 1e-3);
  EXPECT_NEAR(ExpectMs(32), 2, 1e-3);
}

// A kernel that reads a weight once takes as long for a few tokens as for one.
TEST_F(RunTimesTest, AFewTokensTakeAsLongAsOne) {
  Record(1, absl::Milliseconds(1));
  EXPECT_NEAR(ExpectMs(16), 1, 1e-3);
  EXPECT_NEAR(ExpectMs(32), 2, 1e-3);
}

TEST_F(RunTimesTest, NoLoadIsTakenForOne) {
  Record(0, absl::Milliseconds(1));
  Record(1, absl::Milliseconds(1));
  Record(2, absl::Milliseconds(2));
  EXPECT_NEAR(ExpectMs(0), 1, 1e-3);
  EXPECT_NEAR(ExpectMs(1), 1, 1e-3);
  EXPECT_NEAR(ExpectMs(2), 2, 1e-3);
}

TEST_F(RunTimesTest, FollowsAChange) {
  Record(64, absl::Milliseconds(4), 20);
  Record(64, absl::Milliseconds(8), 40);
  EXPECT_NEAR(ExpectMs(64), 8, 0.1);
  EXPECT_NEAR(absl::ToDoubleMilliseconds(times_.Expect(key_, 64, now_).best), 6, 2);
}

TEST_F(RunTimesTest, AColdFirstRunIsReplaced) {
  Record(64, absl::Seconds(1));
  Record(64, absl::Milliseconds(4));
  EXPECT_NEAR(ExpectMs(64), 4, 1e-3);
}

// The process was stopped, or the clock was set.
TEST_F(RunTimesTest, OneRunOfDaysChangesLittle) {
  constexpr absl::Duration kDays = absl::Hours(72);
  Record(4, absl::Milliseconds(2), 8);
  Record(4, kDays);
  EXPECT_LE(ExpectMs(4), 4);
  Record(4, -kDays);
  EXPECT_GE(ExpectMs(4), 2);
  Record(4, absl::Milliseconds(2), 30);
  // Another point's first run, on either side.
  Record(512, kDays);
  EXPECT_LE(ExpectMs(8), 7);
  EXPECT_FALSE(times_.Expect(key_, 8, now_).sure);
  Record(1, kDays);
  EXPECT_LE(ExpectMs(2), 17);
  EXPECT_LE(ExpectMs(8), 7);
}

TEST_F(RunTimesTest, ALargeChangeIsLearnedWithinAFewRuns) {
  Record(64, absl::Milliseconds(1), 8);
  Record(64, absl::Seconds(1), 40);
  EXPECT_NEAR(ExpectMs(64), 1000, 50);
}

TEST_F(RunTimesTest, IsSureOfRecentRunsOnly) {
  Record(64, absl::Milliseconds(4), 3);
  EXPECT_FALSE(times_.Expect(key_, 64, now_).sure);
  Record(64, absl::Milliseconds(4));
  EXPECT_TRUE(times_.Expect(key_, 64, now_).sure);
  EXPECT_FALSE(times_.Expect(key_, 64, now_ + absl::Seconds(2)).sure);
}

TEST_F(RunTimesTest, AnyNumberOfShapesTakesBoundedMemory) {
  for (uint64_t shape = 0; shape < 100'000; ++shape) {
    times_.Record({.operation = &operation_, .shape = shape}, 1, absl::Milliseconds(1), now_);
  }
  EXPECT_GT(times_.Expect({.operation = &operation_, .shape = 99'999}, 1, now_).usual,
            absl::ZeroDuration());
  EXPECT_LE(times_.size(), 4096);
}

}  // namespace
}  // namespace awqd::batching
