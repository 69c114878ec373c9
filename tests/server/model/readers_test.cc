// Several linears at a time: each once, in order, and the first failure of all.
#include "server/model/readers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <new>
#include <vector>

namespace awqd::model {
namespace {

TEST(OnReadersTest, EachNumberOnce) {
  for (const int readers : {1, 2, 5}) {
    std::vector<std::atomic<int>> done(100);
    const absl::Status status = RunOnReaders(readers, 100, [&](int reader, int64_t i) {
      EXPECT_GE(reader, 0);
      EXPECT_LT(reader, readers);
      ++done[i];
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok());
    for (const std::atomic<int>& times : done) EXPECT_EQ(times, 1);
  }
  EXPECT_TRUE(RunOnReaders(2, 0, [](int, int64_t) { return absl::InternalError("x"); }).ok());
}

// Each of the two waits until the other has begun.
TEST(OnReadersTest, TwoAtATime) {
  std::latch both(2);
  EXPECT_TRUE(RunOnReaders(2, 2, [&](int, int64_t) {
                both.arrive_and_wait();
                return absl::OkStatus();
              }).ok());
}

TEST(OnReadersTest, TheFirstFailureOfBoth) {
  std::latch both(2);
  std::atomic<int64_t> most{0};
  const absl::Status status = RunOnReaders(2, 1000, [&](int, int64_t i) {
    most = std::max<int64_t>(most, i);
    if (i < 2) {
      both.arrive_and_wait();
      return absl::InternalError(i == 0 ? "first" : "second");
    }
    return absl::OkStatus();
  });
  EXPECT_EQ(status.message(), "first");
  EXPECT_LT(most, 1000);
}

TEST(OnReadersTest, AnExceptionIsThrownToTheCaller) {
  std::atomic<int> begun{0};
  const auto read = [&] {
    return RunOnReaders(2, 1000, [&](int, int64_t i) {
      ++begun;
      if (i == 3) throw std::bad_alloc();
      return absl::OkStatus();
    });
  };
  EXPECT_THROW(static_cast<void>(read()), std::bad_alloc);
  EXPECT_GE(begun, 4);
}

}  // namespace
}  // namespace awqd::model
