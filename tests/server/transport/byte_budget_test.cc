// ByteBudget: bounds, growth, and every way to give back.
#include "server/transport/byte_budget.h"

#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::transport {
namespace {

TEST(ByteBudget, CountsAndRefusesExactly) {
  ByteBudget budget(100);
  absl::StatusOr<ByteLease> first = budget.Take(60, "request");
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(budget.in_flight(), 60);
  const absl::Status refused = budget.Take(41, "request").status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(
      std::string(refused.message()),
      testing::AllOf(testing::HasSubstr("request: got 41 bytes"), testing::HasSubstr("at most 40"),
                     testing::HasSubstr("max_in_flight_bytes, 100")));
  EXPECT_EQ(budget.in_flight(), 60) << "the refused one counts nowhere";
  EXPECT_EQ(budget.refused(), 1);
  EXPECT_TRUE(budget.Take(40, "request").ok());
  EXPECT_EQ(budget.in_flight(), 60) << "a lease that is gone";
}

TEST(ByteBudget, ALeaseGrowsShrinksAndEndsOnce) {
  ByteBudget budget(100);
  {
    ByteLease lease = *budget.Take(10, "request");
    EXPECT_TRUE(lease.Grow(90, "output").ok());
    EXPECT_EQ(lease.bytes(), 100);
    EXPECT_TRUE(absl::IsResourceExhausted(lease.Grow(1, "output")));
    EXPECT_EQ(lease.bytes(), 100);
    lease.ShrinkTo(30);
    lease.ShrinkTo(50);
    EXPECT_EQ(budget.in_flight(), 30);
    ByteLease moved = std::move(lease);
    EXPECT_EQ(budget.in_flight(), 30);
    moved = *budget.Take(5, "request");
    EXPECT_EQ(budget.in_flight(), 5) << "what it held before was given back";
  }
  EXPECT_EQ(budget.in_flight(), 0);
}

TEST(ByteBudget, ALeaseOfNothingCountsNothing) {
  ByteLease lease;
  EXPECT_TRUE(lease.Grow(1000, "output").ok());
  lease.ShrinkTo(0);
  EXPECT_EQ(lease.bytes(), 0);
}

TEST(ByteBudget, NoLimitOnlyCounts) {
  ByteBudget budget(0);
  const ByteLease lease = *budget.Take(int64_t{1} << 60, "request");
  EXPECT_EQ(budget.in_flight(), int64_t{1} << 60);
}

TEST(ByteBudget, NeverPassesItsLimitUnderContention) {
  ByteBudget budget(10);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20000; ++i) {
        absl::StatusOr<ByteLease> lease = budget.Take(3, "request");
        ASSERT_LE(budget.in_flight(), 10);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.in_flight(), 0);
}

}  // namespace
}  // namespace awqd::transport
