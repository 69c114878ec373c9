// The memory that a load frees is reused for its next linear, and returned when the load ends.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <memory>

#include "server/model/readers.h"

namespace awqd::model {
namespace {

constexpr size_t kLinear = 64 << 20;

#if defined(AWQD_JEMALLOC)  // sanitizers bring their own allocator

// Faults of 4 KiB pages, without huge pages.
int64_t Faults() {
  rusage usage = {};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt;
}

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Uses memory as a linear of a load does.
void UseAndFree() {
  const std::unique_ptr<char[]> linear(new char[kLinear]);
  // Volatile, because a compiler may omit writes that are not read.
  volatile char* const bytes = linear.get();
  for (size_t at = 0; at < kLinear; at += 4096) bytes[at] = 1;
}

TEST(LoadMemoryTest, IsUsedAgainAndGivenBack) {
  const int64_t resident = ResidentBytes();
  {
    const LoadMemory memory;
    UseAndFree();
    const int64_t before = Faults();
    for (int i = 0; i < 4; ++i) UseAndFree();
    EXPECT_LT(Faults() - before, static_cast<int64_t>(kLinear / 4096 / 10));
    EXPECT_GE(ResidentBytes(), resident + static_cast<int64_t>(kLinear / 2));
  }
  EXPECT_LT(ResidentBytes(), resident + static_cast<int64_t>(kLinear / 8));
}

TEST(LoadMemoryTest, AnotherLoadKeepsIt) {
  const LoadMemory first;
  UseAndFree();
  { const LoadMemory second; }
  const int64_t before = Faults();
  UseAndFree();
  EXPECT_LT(Faults() - before, static_cast<int64_t>(kLinear / 4096 / 10));
}

#else

TEST(LoadMemoryTest, DoesNothingWithAnotherAllocator) {
  const LoadMemory memory;
  const std::unique_ptr<char[]> linear(new char[kLinear]);
  EXPECT_NE(linear, nullptr);
}

#endif

}  // namespace
}  // namespace awqd::model
