// What the system says of pages that go round the memory nodes.
#include "kernels/base/memory_nodes.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "kernels/base/huge_pages.h"

namespace awqd {
namespace {

// The policy of the page at `data`; -1 where the system does not say.
int PolicyOf(void* data) {
  int mode = -1;
  if (syscall(SYS_get_mempolicy, &mode, nullptr, 0, data, MPOL_F_ADDR) != 0) return -1;
  return mode;
}

TEST(MemoryNodes, PagesGoRound) {
  constexpr int64_t kBytes = 3 * kHugePageBytes;
  void* const data = MapHugePages(kBytes);
  ASSERT_NE(data, nullptr);
  if (!InterleavePages(data, kBytes)) {
    UnmapHugePages(data, kBytes);
    GTEST_SKIP() << "this system has no memory policies";
  }
  EXPECT_EQ(PolicyOf(data), MPOL_INTERLEAVE);
  EXPECT_EQ(PolicyOf(static_cast<char*>(data) + kBytes - 1), MPOL_INTERLEAVE);
  std::memset(data, 1, kBytes);
  UnmapHugePages(data, kBytes);
}

TEST(MemoryNodes, OfADeviceThatWasAskedTo) {
  for (const bool interleave : {false, true}) {
    const auto device = OpenCpuDevice(1, 0, std::nullopt, false, "", {.interleave = interleave});
    const Buffer large = device->Allocate(MemoryKind::kDevice, 2 * kHugePageBytes).value();
    const int policy = PolicyOf(large.data());
    if (policy < 0) GTEST_SKIP() << "this system has no memory policies";
    EXPECT_EQ(policy == MPOL_INTERLEAVE, interleave);
    const Buffer small = device->Allocate(MemoryKind::kDevice, 100).value();
    std::memset(small.data(), 1, 100);
  }
}

}  // namespace
}  // namespace awqd
