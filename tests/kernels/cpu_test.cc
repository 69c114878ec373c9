// The CPU device and its thread pool.
#include <sched.h>

#include <atomic>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "kernels/cpu/device.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernels.h"
#include "tests/testing/matchers.h"
#include "tests/testing/random_weight.h"

namespace awqd {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;

TEST(CpuDevice, KeepsToItsBudget) {
  auto device = OpenCpuDevice({.cpu_threads = 2, .budget_bytes = 1000});
  auto first = device->Allocate(MemoryKind::kDevice, 600);
  ASSERT_THAT(first.status(), IsOk());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first->data()) % 256, 0u);
  EXPECT_EQ(device->UsedBytes(), 600);
  EXPECT_EQ(device->FreeBytes(), 400);
  const auto second = device->Allocate(MemoryKind::kDevice, 500);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(second.status().ToString(), HasSubstr("asked for 500 bytes, 400 bytes are free"));
  EXPECT_THAT(device->Allocate(MemoryKind::kStaging, 500).status(), IsOk());
  first->Reset();
  EXPECT_EQ(device->UsedBytes(), 0);
  device->SetBudget(0);
  EXPECT_GT(device->FreeBytes(), 1000);
  EXPECT_EQ(device->Allocate(MemoryKind::kDevice, int64_t{1} << 60).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(device->Allocate(MemoryKind::kDevice, -1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(CpuDevice, SeveralHaveIdsAndMemoryOfTheirOwn) {
  const auto plain = OpenDevice("cpu", {}), first = OpenDevice("cpu:0", {.budget_bytes = 1000}),
             second = OpenDevice("cpu:12", {.budget_bytes = 1000});
  ASSERT_TRUE(plain.ok() && first.ok() && second.ok());
  EXPECT_EQ((*plain)->info().id, "cpu");
  EXPECT_EQ((*first)->info().id, "cpu:0");
  EXPECT_EQ((*second)->info().id, "cpu:12");
  EXPECT_EQ((*second)->info().index, 12);
  const auto buffer = (*first)->Allocate(MemoryKind::kWeights, 600);
  ASSERT_THAT(buffer.status(), IsOk());
  EXPECT_EQ((*second)->FreeBytes(), 1000);
  for (const char* bad : {"cpu:", "cpu:-1", "cpu:x", "cpu0", "gpu:0", ""}) {
    EXPECT_EQ(OpenDevice(bad, {}).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(CpuDevice, AFailedPrepareLeavesNothingAllocated) {
  auto device = OpenCpuDevice({.cpu_threads = 1, .budget_bytes = 4096});
  testing::WeightSpec spec;
  spec.k = 256;
  EXPECT_EQ(PrepareWeight(testing::RandomWeight(spec), *device).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(device->UsedBytes(), 0);
}

TEST(ThreadPool, RunsEveryTaskOnceWhoeverCalls) {
  ThreadPool pool(4);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        std::vector<std::atomic<int>> seen(round % 17 + 1);
        pool.ParallelFor(seen.size(), [&](int64_t task, int thread) {
          if (thread < 0 || thread >= 4) ++wrong;
          ++seen[task];
        });
        for (auto& count : seen) wrong += count != 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// Each worker has one core; callers keep all of theirs.
TEST(ThreadPool, PinnedWorkersStayWhereTheyArePut) {
  const auto cores = [] {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    EXPECT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
    return CPU_COUNT(&mask);
  };
  const int all = cores();
  for (const bool pin : {false, true}) {
    ThreadPool pool(3, pin);
    int seen[3] = {};
    std::atomic<int> here{0};
    pool.ParallelFor(3, [&](int64_t, int thread) {
      seen[thread] = cores();
      // One task for each thread: none ends before all have begun.
      ++here;
      while (here < 3) std::this_thread::yield();
    });
    EXPECT_EQ(seen[0], all);
    EXPECT_EQ(seen[1], pin ? 1 : all);
    EXPECT_EQ(seen[2], pin ? 1 : all);
  }
}

TEST(Isa, TheEnvironmentOnlyLowers) {
  const char* inherited = std::getenv("AWQD_CPU_ISA");
  const std::string restore = inherited == nullptr ? "" : inherited;
  unsetenv("AWQD_CPU_ISA");
  const CpuIsa best = DetectIsa();
  // The name of another architecture's instruction set, or an unknown name, is ignored.
  const auto is_arm = [](CpuIsa isa) { return isa == CpuIsa::kNeon || isa == CpuIsa::kNeonDot; };
  for (CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kNeon, CpuIsa::kNeonDot, CpuIsa::kAvx2,
                     CpuIsa::kAvxVnni, CpuIsa::kAvx512, CpuIsa::kAvx512Vnni, CpuIsa::kAmx}) {
    ASSERT_EQ(setenv("AWQD_CPU_ISA", std::string(Name(isa)).c_str(), 1), 0);
    const bool known = isa == CpuIsa::kPortable || is_arm(isa) == is_arm(best);
    const CpuIsa expected = known ? std::min(isa, best) : best;
    // A machine with more than AVX2 may lack AVX-VNNI alone.
    if (expected == CpuIsa::kAvxVnni && DetectIsa() == CpuIsa::kAvx2) continue;
    EXPECT_EQ(DetectIsa(), expected) << Name(isa);
  }
  ASSERT_EQ(setenv("AWQD_CPU_ISA", "sse9", 1), 0);
  EXPECT_EQ(DetectIsa(), best);
  ASSERT_EQ(setenv("AWQD_CPU_ISA", restore.c_str(), 1), 0);
}

}  // namespace
}  // namespace awqd
