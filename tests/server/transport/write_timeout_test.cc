// WriteTimeout: which writes are late, and which are not.
#include <atomic>
#include <deque>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/transport/slow_clients.h"
#include "tests/testing/eventually.h"

namespace awqd::transport {
namespace {

TEST(WriteTimeout, CallsThoseThatAreLateOnceAndInOrder) {
  WriteTimeout timeout(absl::Milliseconds(50));
  std::atomic<int> late{0};
  std::array<int, 3> order = {};
  std::deque<WriteTimeout::Write> writes;
  const absl::Time begin = absl::Now();
  for (int& place : order) writes.emplace_back([&] { place = ++late; });
  for (WriteTimeout::Write& write : writes) timeout.Begin(&write);
  timeout.End(&writes[1]);
  ASSERT_TRUE(Eventually([&] { return late == 2; }));
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(50));
  timeout.End(&writes[0]);
  timeout.End(&writes[2]);
  EXPECT_EQ(order, (std::array<int, 3>{1, 0, 2}));
  timeout.Begin(&writes[1]);
  EXPECT_TRUE(Eventually([&] { return late == 3; })) << "the next message of the same call";
  timeout.End(&writes[1]);
}

TEST(WriteTimeout, EndsInAnyOrder) {
  WriteTimeout timeout(absl::Minutes(1));
  std::deque<WriteTimeout::Write> writes;
  for (int i = 0; i < 4; ++i) writes.emplace_back([] { ADD_FAILURE() << "nobody is late"; });
  for (const std::array<int, 4>& order : {std::array{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 2, 0, 3}}) {
    for (WriteTimeout::Write& write : writes) timeout.Begin(&write);
    for (const int i : order) timeout.End(&writes[i]);
  }
}

TEST(WriteTimeout, NobodyIsLateWithoutATimeout) {
  WriteTimeout timeout(absl::InfiniteDuration());
  WriteTimeout::Write write([] { ADD_FAILURE(); });
  timeout.Begin(&write);
  timeout.End(&write);
}

}  // namespace
}  // namespace awqd::transport
