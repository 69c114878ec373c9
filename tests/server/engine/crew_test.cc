// Crew: everything is done once, by several threads, and Share waits for all of it.
#include "server/engine/crew.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kernels/base/mutex.h"

namespace awqd::engine {
namespace {

TEST(CrewTest, DoesEverythingOnceForSeveralCallers) {
  Crew crew(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int64_t count = 0; count < 200; ++count) {
        // Not atomic: Share orders the writes of bodies before its end.
        std::vector<int> seen(count);
        crew.Share(count, /*grain=*/count % 9, [&](int64_t i) { ++seen[i]; });
        for (int times : seen) wrong += times != 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// Each body waits for the other, so only two threads can finish.
TEST(CrewTest, SharesAreDoneSideBySide) {
  Crew crew(1);
  Mutex mu;
  CondVar met;
  int inside = 0;
  crew.Share(2, /*grain=*/1, [&](int64_t) {
    MutexLock lock(&mu);
    ++inside;
    met.NotifyAll();
    while (inside < 2) met.Wait(&mu);
  });
  EXPECT_EQ(inside, 2);
}

TEST(CrewTest, AFewStayWithTheirCaller) {
  Crew crew(2);
  const auto caller = std::this_thread::get_id();
  crew.Share(4, /*grain=*/4, [&](int64_t) { EXPECT_EQ(std::this_thread::get_id(), caller); });
}

TEST(CrewTest, NobodyIsNeeded) {
  Crew crew(0);
  int64_t sum = 0;
  crew.Share(5, /*grain=*/1, [&](int64_t i) { sum += i; });
  EXPECT_EQ(sum, 10);
}

}  // namespace
}  // namespace awqd::engine
