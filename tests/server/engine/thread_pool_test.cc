// ThreadPool: every iteration runs once, on several threads, and ParallelFor waits for all.
#include "server/engine/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kernels/base/mutex.h"

namespace awqd::engine {
namespace {

TEST(ThreadPoolTest, DoesEverythingOnceForSeveralCallers) {
  ThreadPool pool(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int64_t count = 0; count < 200; ++count) {
        std::vector<int> seen(count);  // not atomic: Share orders what bodies wrote before its end
        pool.ParallelFor(count, /*grain=*/count % 9, [&](int64_t i) { ++seen[i]; });
        for (int times : seen) wrong += times != 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// Each body waits for the other: only two threads get through.
TEST(ThreadPoolTest, ChunksRunSideBySide) {
  ThreadPool pool(1);
  Mutex mu;
  CondVar met;
  int inside = 0;
  pool.ParallelFor(2, /*grain=*/1, [&](int64_t) {
    MutexLock lock(&mu);
    ++inside;
    met.NotifyAll();
    while (inside < 2) met.Wait(&mu);
  });
  EXPECT_EQ(inside, 2);
}

TEST(ThreadPoolTest, AFewStayWithTheirCaller) {
  ThreadPool pool(2);
  const auto caller = std::this_thread::get_id();
  pool.ParallelFor(4, /*grain=*/4, [&](int64_t) { EXPECT_EQ(std::this_thread::get_id(), caller); });
}

TEST(ThreadPoolTest, NobodyIsNeeded) {
  ThreadPool pool(0);
  int64_t sum = 0;
  pool.ParallelFor(5, /*grain=*/1, [&](int64_t i) { sum += i; });
  EXPECT_EQ(sum, 10);
}

}  // namespace
}  // namespace awqd::engine
