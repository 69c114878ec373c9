// SendWatch: finds calls that send too slowly, and no others.
#include "server/transport/send_watch.h"

#include <atomic>
#include <deque>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace awqd::transport {
namespace {

bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return false;
}

TEST(SendWatch, CallsThoseThatAreLateOnceAndInOrder) {
  SendWatch watch(absl::Milliseconds(50));
  std::atomic<int> late{0};
  std::array<int, 3> order = {};
  std::deque<SendWatch::Send> sends;
  const absl::Time begin = absl::Now();
  for (int& place : order) sends.emplace_back([&] { place = ++late; });
  for (SendWatch::Send& send : sends) watch.Begin(&send);
  watch.End(&sends[1]);
  ASSERT_TRUE(Eventually([&] { return late == 2; }));
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(50));
  watch.End(&sends[0]);
  watch.End(&sends[2]);
  EXPECT_EQ(order, (std::array<int, 3>{1, 0, 2}));
  watch.Begin(&sends[1]);
  EXPECT_TRUE(Eventually([&] { return late == 3; })) << "the next message of the same call";
  watch.End(&sends[1]);
}

TEST(SendWatch, EndsInAnyOrder) {
  SendWatch watch(absl::Minutes(1));
  std::deque<SendWatch::Send> sends;
  for (int i = 0; i < 4; ++i) sends.emplace_back([] { ADD_FAILURE() << "nobody is late"; });
  for (const std::array<int, 4>& order : {std::array{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 2, 0, 3}}) {
    for (SendWatch::Send& send : sends) watch.Begin(&send);
    for (const int i : order) watch.End(&sends[i]);
  }
}

TEST(SendWatch, NobodyIsLateWithoutATimeout) {
  SendWatch watch(absl::InfiniteDuration());
  SendWatch::Send send([] { ADD_FAILURE(); });
  watch.Begin(&send);
  watch.End(&send);
}

}  // namespace
}  // namespace awqd::transport
