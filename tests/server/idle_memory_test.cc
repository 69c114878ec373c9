// Detects idleness, and returns memory.
#include "kernels/base/idle_memory.h"

#if defined(AWQD_JEMALLOC)
#include <jemalloc/jemalloc.h>
#endif
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <vector>

#include "gtest/gtest.h"

namespace awqd {
namespace {

// Ticks every 50 ms for `length` with `share` of a processor; returns how often the watch was true.
class Spell {
 public:
  int Run(absl::Duration length, double share) {
    int returns = 0;
    for (absl::Duration passed; passed < length; passed += kTick) {
      now_ += kTick;
      used_ += kTick * share;
      returns += watch_.Tick(now_, used_) ? 1 : 0;
    }
    return returns;
  }

 private:
  static constexpr absl::Duration kTick = absl::Milliseconds(50);
  IdleWatch watch_;
  absl::Time now_ = absl::UnixEpoch();
  absl::Duration used_;
};

[[maybe_unused]] int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(IdleWatchTest, OnceAfterEachSpellOfWork) {
  Spell spell;
  EXPECT_EQ(spell.Run(absl::Seconds(10), 0), 0) << "nothing was done yet";
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(spell.Run(absl::Seconds(5), 2), 0) << "busy";
    EXPECT_EQ(spell.Run(absl::Milliseconds(900), 0), 0) << "not idle for long enough";
    EXPECT_EQ(spell.Run(absl::Seconds(60), 0.005), 1);
  }
}

TEST(IdleWatchTest, NotForPausesWithinWork) {
  Spell spell;
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(spell.Run(absl::Milliseconds(200), 1) + spell.Run(absl::Milliseconds(700), 0), 0);
  }
}

TEST(IdleWatchTest, NotForTheServersOwnTicking) {
  Spell spell;
  EXPECT_EQ(spell.Run(absl::Seconds(5), 1) + spell.Run(absl::Seconds(5), 0), 1);
  // Less than kWork in a minute.
  EXPECT_EQ(spell.Run(absl::Minutes(1), 0.001), 0);
}

TEST(IdleMemoryTest, ProcessorTimeGrowsWithWork) {
  const absl::Duration before = ProcessorTime();
  EXPECT_GT(before, absl::ZeroDuration());
  volatile double sum = 0;
  while (ProcessorTime() - before < absl::Milliseconds(2)) sum = sum + 1;
  EXPECT_GE(ProcessorTime() - before, absl::Milliseconds(2));
}

#if defined(AWQD_JEMALLOC)  // sanitizers bring their own allocator
TEST(IdleMemoryTest, TheAllocatorHasItsSettings) {
  size_t largest = 0, size = sizeof(largest);
  ASSERT_EQ(mallctl("opt.tcache_max", &largest, &size, nullptr, 0), 0);
  EXPECT_EQ(largest, 1024u);
}

TEST(IdleMemoryTest, ReturnsWhatLiesBetweenBlocksInUse) {
  constexpr size_t kBlock = 64 << 10, kBlocks = 1024;
  std::vector<char*> blocks;
  for (size_t i = 0; i < kBlocks; ++i) {
    blocks.push_back(static_cast<char*>(malloc(kBlock)));
    for (size_t at = 0; at < kBlock; at += 4096) blocks.back()[at] = 1;
  }
  // Every sixteenth block stays, so that the rest is not the end of the heap.
  for (size_t i = 0; i < kBlocks; ++i) {
    if (i % 16 != 0) free(blocks[i]);
  }
  const int64_t before = ResidentBytes();
  ReturnFreeMemory();
  EXPECT_LE(ResidentBytes(), before - static_cast<int64_t>(kBlock * kBlocks / 2));
  for (size_t i = 0; i < kBlocks; i += 16) free(blocks[i]);
}
#endif

}  // namespace
}  // namespace awqd
