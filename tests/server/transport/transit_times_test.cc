// TransitTimes: what is expected of a call that enters, from those that left.
#include <vector>

#include "gtest/gtest.h"
#include "server/transport/slow_clients.h"

namespace awqd::transport {
namespace {

class TransitTest : public ::testing::Test {
 protected:
  using Clock = TransitStage::Clock;

  // `calls` at once, which take so long each.
  void Pass(int calls, absl::Duration took, bool whole = true) {
    for (int i = 0; i < calls; ++i) stage_.Enter();
    now_ += absl::ToChronoNanoseconds(took);
    for (int i = 0; i < calls; ++i)
      stage_.Leave(now_ - absl::ToChronoNanoseconds(took), now_, whole);
  }
  double ExpectMs() const { return absl::ToDoubleMilliseconds(stage_.Expect(now_)); }

  TransitStage stage_;
  Clock::time_point now_{std::chrono::hours(1)};
};

TEST_F(TransitTest, ExpectsNothingOfWhatItHasNotSeenForASecond) {
  EXPECT_EQ(ExpectMs(), 0);
  Pass(1, absl::Milliseconds(500));
  EXPECT_NEAR(ExpectMs(), 1, 0.01) << "the first call may be one of a slow client";
  now_ += std::chrono::seconds(2);
  EXPECT_EQ(ExpectMs(), 0) << "nobody knows any more";
}

TEST_F(TransitTest, FollowsABacklogAndItsEnd) {
  for (int i = 0; i < 20; ++i) Pass(1, absl::Milliseconds(1));
  for (int i = 0; i < 30; ++i) Pass(1, absl::Milliseconds(50));
  EXPECT_GT(ExpectMs(), 35);
  Pass(1, absl::Milliseconds(1));
  EXPECT_LT(ExpectMs(), 1.5);
}

TEST_F(TransitTest, MoreCallsThanUsualTakeLonger) {
  for (int i = 0; i < 40; ++i) Pass(1, absl::Milliseconds(2));
  for (int i = 0; i < 10; ++i) stage_.Enter();
  EXPECT_NEAR(ExpectMs(), 20, 1);
  for (int i = 0; i < 5000; ++i) stage_.Enter();
  EXPECT_LE(ExpectMs(), 2 * 64 + 1) << "they may wait for their clients";
}

// As many calls as always are no backlog, however many wait for their clients.
TEST_F(TransitTest, CallsThatAreStuckAreNoBacklog) {
  for (int i = 0; i < 1000; ++i) stage_.Enter();
  for (int i = 0; i < 60; ++i) Pass(1, absl::Milliseconds(1));
  EXPECT_LT(ExpectMs(), 1.5);
}

// Two in three clients are slow, or so they seem.
TEST_F(TransitTest, SlowClientsDoNotCountForOthers) {
  for (int i = 0; i < 200; ++i) {
    Pass(1, absl::Milliseconds(1));
    Pass(2, absl::Milliseconds(900));
  }
  EXPECT_LT(ExpectMs(), 3);
}

// A client that cancels at once says nothing of the others, and one that cancels late does.
TEST_F(TransitTest, CancelledCallsOnlyCountAsLong) {
  for (int i = 0; i < 80; ++i) Pass(1, absl::Milliseconds(10));
  for (int i = 0; i < 20; ++i) Pass(1, absl::Milliseconds(1), false);
  EXPECT_NEAR(ExpectMs(), 10, 0.1);
  for (int i = 0; i < 40; ++i) Pass(1, absl::Milliseconds(100), false);
  EXPECT_GT(ExpectMs(), 50);
}

}  // namespace
}  // namespace awqd::transport
