// The limits that process_limits.h reports, with invented folders of /proc and of both versions of cgroups.
#include "kernels/base/process_limits.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <string>

#include "gtest/gtest.h"

namespace awqd {
namespace {

class ProcessLimits : public ::testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file(root_ + path);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  const std::string root_ = ::testing::TempDir() + "/process_limits_" +
                            ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

constexpr char kMemInfo[] = "MemTotal: 2000 kB\nMemFree: 3 kB\nMemAvailable: 1000 kB\n";

TEST_F(ProcessLimits, TheMachineCountsWithoutALimit) {
  Write("/proc/meminfo", kMemInfo);
  Write("/sys/fs/cgroup/memory.max", "max\n");
  Write("/sys/fs/cgroup/memory.current", "999999999\n");
  EXPECT_EQ(TotalMemoryBytes(root_), 2000 * 1024);
  EXPECT_EQ(ReadAvailableMemoryBytes(root_), 1000 * 1024);
}

TEST_F(ProcessLimits, FilesThatTheKernelKeepsAreNotUsed) {
  Write("/proc/meminfo", kMemInfo);
  Write("/sys/fs/cgroup/memory.max", "700000\n");
  Write("/sys/fs/cgroup/memory.current", "600000\n");
  EXPECT_EQ(ReadAvailableMemoryBytes(root_), 100000);
  Write("/sys/fs/cgroup/memory.stat",
        "anon 90000\nfile 510000\ninactive_file 500000\nactive_file 10000\n");
  EXPECT_EQ(TotalMemoryBytes(root_), 700000);
  EXPECT_EQ(ReadAvailableMemoryBytes(root_), 600000);
}

TEST_F(ProcessLimits, Version1HasOtherNames) {
  Write("/proc/meminfo", kMemInfo);
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "700000\n");
  Write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "600000\n");
  Write("/sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 500000\n");
  EXPECT_EQ(ReadAvailableMemoryBytes(root_), 600000);
}

// The process's own cgroup and those above it count, of either version, and nothing beside them.
TEST_F(ProcessLimits, TheLeastLimitOfAllCgroupsAboveCounts) {
  Write("/proc/meminfo", kMemInfo);
  Write("/proc/self/cgroup", "0::/system.slice/awqd.service\n");
  Write("/sys/fs/cgroup/system.slice/awqd.service/memory.max", "900000\n");
  Write("/sys/fs/cgroup/system.slice/awqd.service/memory.current", "1000\n");
  EXPECT_EQ(TotalMemoryBytes(root_), 900000);
  EXPECT_EQ(ReadAvailableMemoryBytes(root_), 899000);
  Write("/sys/fs/cgroup/system.slice/memory.max", "800000\n");
  Write("/sys/fs/cgroup/system.slice/memory.current", "700000\n");
  EXPECT_EQ(TotalMemoryBytes(root_), 800000);
  EXPECT_EQ(ReadAvailableMemoryBytes(root_), 100000);
  Write("/sys/fs/cgroup/system.slice/other.service/memory.max", "5\n");
  Write("/sys/fs/cgroup/system.slice/awqd.service/below/memory.max", "5\n");
  EXPECT_EQ(TotalMemoryBytes(root_), 800000);
}

TEST_F(ProcessLimits, AboveInVersion1AndBesideVersion2) {
  Write("/proc/meminfo", kMemInfo);
  Write("/proc/self/cgroup",
        "9:name=systemd:/job\n4:memory:/slurm/job_7\n2:cpu,cpuacct:/slurm/job_7\n0::/job\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("/sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "900000\n");
  Write("/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", "950000\n");
  EXPECT_EQ(TotalMemoryBytes(root_), 900000);
  // A container does not see the cgroups above its own, but their limit.
  Write("/sys/fs/cgroup/memory/slurm/job_7/memory.stat", "hierarchical_memory_limit 850000\n");
  EXPECT_EQ(TotalMemoryBytes(root_), 850000);
  Write("/sys/fs/cgroup/unified/job/memory.max", "800000\n");
  EXPECT_EQ(TotalMemoryBytes(root_), 800000);
  for (const char* folder : {"cpu", "cpu,cpuacct"}) {
    const std::string quota = std::string("/sys/fs/cgroup/") + folder + "/slurm/cpu.cfs_quota_us";
    Write(std::string("/sys/fs/cgroup/") + folder + "/slurm/cpu.cfs_period_us", "100000\n");
    Write(quota, "-1\n");
    EXPECT_EQ(UsableThreads(root_), UsableThreads(root_ + "/empty")) << folder;
    Write(quota, "50000\n");
    EXPECT_EQ(UsableThreads(root_), 1) << folder;
    Write(quota, "-1\n");
  }
}

// A container shows its own cgroup as the root, whatever path the host has for it.
TEST_F(ProcessLimits, ContainersShowAPartOfThePath) {
  Write("/proc/meminfo", kMemInfo);
  Write("/sys/fs/cgroup/memory.max", "900000\n");
  Write("/sys/fs/cgroup/sub/memory.max", "700000\n");
  for (const auto& [path, bytes] : std::map<std::string, int64_t>{{"/", 900000},
                                                                  {"/docker/0123", 900000},
                                                                  {"/docker/0123/sub", 700000},
                                                                  {"/../../other", 900000},
                                                                  {"/gone (deleted)", 900000}}) {
    Write("/proc/self/cgroup", "0::" + path + "\n");
    EXPECT_EQ(TotalMemoryBytes(root_), bytes) << path;
  }
}

TEST_F(ProcessLimits, TheLeastQuotaOfAllCgroupsAboveCounts) {
  const int machine = UsableThreads(root_);
  EXPECT_GE(machine, 1);
  Write("/proc/self/cgroup", "0::/pod/container\n");
  Write("/sys/fs/cgroup/pod/container/cpu.max", "max 100000\n");
  EXPECT_EQ(UsableThreads(root_), machine);
  Write("/sys/fs/cgroup/pod/cpu.max", "90000 100000\n");
  EXPECT_EQ(UsableThreads(root_), 1);
  Write("/sys/fs/cgroup/pod/cpu.max", "99900000 100000\n");
  EXPECT_EQ(UsableThreads(root_), machine);
  Write("/sys/fs/cgroup/pod/container/cpu.max", "110000 100000\n");
  EXPECT_EQ(UsableThreads(root_), std::min(machine, 2)) << "a part of a core is used too";
  Write("/sys/fs/cgroup/pod/container/cpu.max", "nonsense\n");
  EXPECT_EQ(UsableThreads(root_), machine);
}

TEST_F(ProcessLimits, NeverLessThanNothingNorMoreThanTheMachine) {
  Write("/proc/meminfo", kMemInfo);
  Write("/sys/fs/cgroup/memory.max", "700000\n");
  Write("/sys/fs/cgroup/memory.current", "700001\n");
  EXPECT_EQ(ReadAvailableMemoryBytes(root_), 0);
  Write("/sys/fs/cgroup/memory.max", "9223372036854771712\n");
  EXPECT_EQ(ReadAvailableMemoryBytes(root_), 1000 * 1024);
}

TEST_F(ProcessLimits, WhatCannotBeReadRefusesNothing) {
  EXPECT_EQ(TotalMemoryBytes(root_), 0);
  EXPECT_EQ(ReadAvailableMemoryBytes(root_), std::numeric_limits<int64_t>::max());
}

TEST(TryThreads, AsksForBuffersBesideThem) {
  EXPECT_TRUE(TryThreads(1, 1 << 20).ok());
  const absl::Status status = TryThreads(1, int64_t{1} << 60);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("(ulimit -v)"));
}

TEST(TryThreads, SaysWhichLimitsForbidThem) {
  EXPECT_TRUE(TryThreads(50).ok());
#if defined(AWQD_ADDRESS_SANITIZER) || defined(AWQD_THREAD_SANITIZER)
  GTEST_SKIP() << "sanitizers need more address space than the limit allows";
#endif
  // In a child, because what it allocates under the limit stays.
  const auto child = [] {
    rlimit limit = {};
    limit.rlim_cur = limit.rlim_max = 1 << 30;
    setrlimit(RLIMIT_AS, &limit);
    const absl::Status status = TryThreads(5000);
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::_Exit(status.ok() ? 0 : 7);
  };
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(7),
              "RESOURCE_EXHAUSTED: cannot start 5000 threads, only [0-9]+: .*ulimit -u");
}

TEST(TryDescriptors, SaysWhichLimitForbidsThem) {
  EXPECT_TRUE(TryDescriptors(50).ok());
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit low = limit;
  low.rlim_cur = 20;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  const absl::Status status = TryDescriptors(50);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find("Too many open files; raise the limit of open files"),
            absl::string_view::npos)
      << status;
  EXPECT_TRUE(TryDescriptors(50).ok()) << "all are closed again";
}

TEST(OpenStandardDescriptors, OpensThoseThatAreClosed) {
  const auto child = [] {
    close(0);
    close(1);
    OpenStandardDescriptors();
    const int next = open("/dev/null", O_RDONLY);
    const bool good = next > 2 && write(1, "x", 1) == 1 && fcntl(0, F_GETFD) >= 0;
    std::_Exit(good ? 7 : 1);
  };
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace awqd
