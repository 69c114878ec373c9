// memory_facts with made-up folders of /proc and both versions of cgroups.
#include "kernels/base/memory_facts.h"

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "gtest/gtest.h"

namespace awqd {
namespace {

class MemoryFacts : public ::testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file(root_ + path);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  const std::string root_ = ::testing::TempDir() + "/memory_facts_" +
                            ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

constexpr char kMemInfo[] = "MemTotal: 2000 kB\nMemFree: 3 kB\nMemAvailable: 1000 kB\n";

TEST_F(MemoryFacts, TheMachineCountsWithoutALimit) {
  Write("/proc/meminfo", kMemInfo);
  Write("/sys/fs/cgroup/memory.max", "max\n");
  Write("/sys/fs/cgroup/memory.current", "999999999\n");
  EXPECT_EQ(TotalMemoryBytes(root_), 2000 * 1024);
  EXPECT_EQ(AvailableMemoryBytes(root_), 1000 * 1024);
}

TEST_F(MemoryFacts, FilesThatTheKernelKeepsAreNotUsed) {
  Write("/proc/meminfo", kMemInfo);
  Write("/sys/fs/cgroup/memory.max", "700000\n");
  Write("/sys/fs/cgroup/memory.current", "600000\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 100000);
  Write("/sys/fs/cgroup/memory.stat",
        "anon 90000\nfile 510000\ninactive_file 500000\nactive_file 10000\n");
  EXPECT_EQ(TotalMemoryBytes(root_), 700000);
  EXPECT_EQ(AvailableMemoryBytes(root_), 600000);
}

TEST_F(MemoryFacts, Version1HasOtherNames) {
  Write("/proc/meminfo", kMemInfo);
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "700000\n");
  Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "600000\n");
  Write("/sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 500000\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 600000);
}

TEST_F(MemoryFacts, NeverLessThanNothingNorMoreThanTheMachine) {
  Write("/proc/meminfo", kMemInfo);
  Write("/sys/fs/cgroup/memory.max", "700000\n");
  Write("/sys/fs/cgroup/memory.current", "700001\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 0);
  Write("/sys/fs/cgroup/memory.max", "9223372036854771712\n");
  EXPECT_EQ(AvailableMemoryBytes(root_), 1000 * 1024);
}

TEST_F(MemoryFacts, WhatCannotBeReadRefusesNothing) {
  EXPECT_EQ(TotalMemoryBytes(root_), 0);
  EXPECT_EQ(AvailableMemoryBytes(root_), std::numeric_limits<int64_t>::max());
}

}  // namespace
}  // namespace awqd
