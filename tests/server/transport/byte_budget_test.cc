// ByteBudget: limits, growth, and every way to release bytes.
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/transport/limits.h"

namespace awqd::transport {
namespace {

TEST(ByteBudget, CountsAndRefusesExactly) {
  ByteBudget budget(100);
  absl::StatusOr<ByteLease> first = budget.AcquireBytes({}, 60, "request");
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(budget.in_flight(), 60);
  const absl::Status refused = budget.AcquireBytes({}, 41, "request").status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()),
              ::testing::AllOf(::testing::HasSubstr("request: got 41 bytes"),
                               ::testing::HasSubstr("at most 40"),
                               ::testing::HasSubstr("max_in_flight_bytes, 100")));
  EXPECT_EQ(budget.in_flight(), 60) << "the refused one counts nowhere";
  EXPECT_EQ(budget.refused(), 1);
  EXPECT_TRUE(budget.AcquireBytes({}, 40, "request").ok());
  EXPECT_EQ(budget.in_flight(), 60) << "a lease that is gone";
}

TEST(ByteBudget, ALeaseGrowsShrinksAndEndsOnce) {
  ByteBudget budget(100);
  {
    ByteLease lease = *budget.AcquireBytes({}, 10, "request");
    EXPECT_TRUE(lease.Grow(90, "output").ok());
    EXPECT_EQ(lease.bytes(), 100);
    EXPECT_TRUE(absl::IsResourceExhausted(lease.Grow(1, "output")));
    EXPECT_EQ(lease.bytes(), 100);
    lease.ShrinkTo(30);
    lease.ShrinkTo(50);
    EXPECT_EQ(budget.in_flight(), 30);
    ByteLease moved = std::move(lease);
    EXPECT_EQ(budget.in_flight(), 30);
    moved = *budget.AcquireBytes({}, 5, "request");
    EXPECT_EQ(budget.in_flight(), 5) << "what it held before was given back";
  }
  EXPECT_EQ(budget.in_flight(), 0);
}

TEST(ByteBudget, ALeaseIsMadeAsLargeAsItHasToBe) {
  ByteBudget budget(100);
  ByteLease lease = *budget.AcquireBytes({}, 10, "request");
  EXPECT_TRUE(lease.Resize(70, "answer").ok());
  EXPECT_TRUE(absl::IsResourceExhausted(lease.Resize(101, "answer")));
  EXPECT_EQ(budget.in_flight(), 70);
  EXPECT_TRUE(lease.Resize(20, "answer").ok());
  EXPECT_EQ(budget.in_flight(), 20);
}

TEST(ByteBudget, SpareBytesLeaveHalfOfItFree) {
  ByteBudget budget(100);
  ByteLease lease = *budget.AcquireBytes({}, 10, "request");
  EXPECT_FALSE(lease.GrowFromSpare(41));
  EXPECT_TRUE(lease.GrowFromSpare(40));
  EXPECT_EQ(budget.in_flight(), 50);
  EXPECT_FALSE(lease.GrowFromSpare(1));
  EXPECT_EQ(budget.refused(), 0) << "nobody was refused anything";
  ByteBudget unbounded(0);
  EXPECT_TRUE((*unbounded.AcquireBytes({}, 1, "request")).GrowFromSpare(1 << 20));
}

TEST(ByteBudget, NothingMoreIsNeverRefused) {
  ByteBudget budget(100);
  const auto connection = std::make_shared<Connection>();
  const ByteLease all = *budget.AcquireBytes({.connection = connection}, 100, "request");
  EXPECT_TRUE(budget.AcquireBytes({.connection = connection}, 0, "request").ok());
}

TEST(ByteBudget, ALeaseOfNothingCountsNothing) {
  ByteLease lease;
  EXPECT_TRUE(lease.Grow(1000, "output").ok());
  lease.ShrinkTo(0);
  EXPECT_EQ(lease.bytes(), 0);
}

TEST(ByteBudget, NoLimitOnlyCounts) {
  ByteBudget budget(0);
  const ByteLease lease = *budget.AcquireBytes({}, int64_t{1} << 60, "request");
  EXPECT_EQ(budget.in_flight(), int64_t{1} << 60);
}

TEST(ByteBudget, OneConnectionLeavesAsMuchAsItHas) {
  ByteBudget budget(100);
  const auto greedy = std::make_shared<Connection>(), modest = std::make_shared<Connection>();
  const ByteLease first = *budget.AcquireBytes({.connection = greedy}, 30, "request");
  std::optional<ByteLease> second = *budget.AcquireBytes({.connection = greedy}, 20, "request");
  const absl::Status refused = budget.AcquireBytes({.connection = greedy}, 1, "request").status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()),
              ::testing::AllOf(::testing::HasSubstr("request: got 1 bytes, expected at most 0"),
                               ::testing::HasSubstr("this connection holds 50 bytes")));
  EXPECT_EQ(greedy->bytes(), 50);
  const ByteLease other = *budget.AcquireBytes({.connection = modest}, 25, "request");
  EXPECT_TRUE(budget.AcquireBytes({.connection = modest}, 1, "request").ok() == false)
      << "25 are left for others";
  EXPECT_EQ(budget.in_flight(), 75);
  second.reset();
  EXPECT_EQ(greedy->bytes(), 30);
  EXPECT_TRUE(budget.AcquireBytes({.connection = greedy}, 7, "request").ok()) << "37 and 38 left";
  EXPECT_FALSE(budget.AcquireBytes({.connection = greedy}, 8, "request").ok());
}

TEST(ByteBudget, GreedyConnectionsLeaveRoomForTheNext) {
  ByteBudget budget(6000);
  std::vector<ByteLease> leases;
  std::vector<std::shared_ptr<Connection>> callers;
  for (int i = 0; i < 5; ++i) callers.push_back(std::make_shared<Connection>());
  for (bool any = true; any;) {
    any = false;
    for (const auto& caller : callers) {
      absl::StatusOr<ByteLease> lease = budget.AcquireBytes({.connection = caller}, 10, "request");
      if (!lease.ok()) continue;
      any = true;
      leases.push_back(*std::move(lease));
    }
  }
  for (const auto& caller : callers) EXPECT_EQ(caller->bytes(), 1000);
  EXPECT_TRUE(
      budget.AcquireBytes({.connection = std::make_shared<Connection>()}, 1000, "request").ok())
      << "a sixth is free";
}

TEST(ByteBudget, OneGreedyConnectionAfterTheOtherLeavesRoomAsWell) {
  ByteBudget budget(6000);
  std::vector<ByteLease> leases;
  std::vector<std::shared_ptr<Connection>> callers;
  for (int i = 0; i < 5; ++i) {
    callers.push_back(std::make_shared<Connection>());
    for (;;) {
      absl::StatusOr<ByteLease> lease =
          budget.AcquireBytes({.connection = callers.back()}, 10, "request");
      if (!lease.ok()) break;
      leases.push_back(*std::move(lease));
    }
    EXPECT_EQ(budget.in_flight(), 6000 / (i + 2) * (i + 1));
  }
  EXPECT_TRUE(
      budget.AcquireBytes({.connection = std::make_shared<Connection>()}, 1000, "request").ok())
      << "a sixth is free";
  leases.clear();
  const ByteLease first = *budget.AcquireBytes({.connection = callers[0]}, 1500, "request");
  EXPECT_TRUE(budget.AcquireBytes({.connection = callers[0]}, 1500, "request").ok())
      << "the others hold nothing";
  EXPECT_FALSE(budget.AcquireBytes({.connection = callers[0]}, 1501, "request").ok());
}

TEST(ByteBudget, ASingleCallMayTakeWhatIsFree) {
  ByteBudget budget(100);
  const auto caller = std::make_shared<Connection>();
  ByteLease lease = *budget.AcquireBytes({.connection = caller}, 60, "request");
  EXPECT_TRUE(lease.Grow(40, "output").ok());
  EXPECT_EQ(caller->bytes(), 100);
  lease = ByteLease();
  EXPECT_EQ(caller->bytes(), 0);
}

TEST(ByteBudget, NeverPassesItsLimitUnderContention) {
  ByteBudget budget(10);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20000; ++i) {
        absl::StatusOr<ByteLease> lease = budget.AcquireBytes({}, 3, "request");
        ASSERT_LE(budget.in_flight(), 10);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.in_flight(), 0);
}

// A connection's bytes, and whether it is among those with bytes, change one after the other.
TEST(ByteBudget, SmallCallsOfOneConnectionAreNeverRefused) {
  ByteBudget budget(int64_t{1} << 31);
  const auto caller = std::make_shared<Connection>();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200000; ++i) {
        EXPECT_TRUE(budget.AcquireBytes({.connection = caller}, 8192, "request").ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.refused(), 0);
  EXPECT_EQ(caller->bytes(), 0);
}

}  // namespace
}  // namespace awqd::transport
