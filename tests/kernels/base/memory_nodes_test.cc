// The system's policy of interleaved pages.
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

// The policy of the page at `data`; -1 if the system does not tell.
int PolicyOf(void* data) {
  int mode = -1;
  if (syscall(SYS_get_mempolicy, &mode, nullptr, 0, data, MPOL_F_ADDR) != 0) return -1;
  return mode;
}

class MemoryNodes : public ::testing::Test {
 protected:
  static constexpr int64_t kBytes = 3 * kHugePageBytes;

  void SetUp() override {
    ASSERT_NE(data_, nullptr);
    if (!InterleavePages(data_, kBytes)) GTEST_SKIP() << "this system has no memory policies";
  }
  void TearDown() override {
    if (data_ != nullptr) UnmapHugePages(data_, kBytes);
  }

  void* const data_ = MapHugePages(kBytes);
};

TEST_F(MemoryNodes, PagesGoRound) {
  EXPECT_EQ(PolicyOf(data_), MPOL_INTERLEAVE);
  EXPECT_EQ(PolicyOf(static_cast<char*>(data_) + kBytes - 1), MPOL_INTERLEAVE);
  std::memset(data_, 1, kBytes);
}

TEST_F(MemoryNodes, OfADeviceThatWasAskedTo) {
  for (const bool interleave : {false, true}) {
    const auto device = OpenCpuDevice(1, 0, std::nullopt, false, "", {.interleave = interleave});
    const Buffer large = device->Allocate(MemoryKind::kDevice, 2 * kHugePageBytes).value();
    EXPECT_EQ(PolicyOf(large.data()) == MPOL_INTERLEAVE, interleave);
    const Buffer small = device->Allocate(MemoryKind::kDevice, 100).value();
    std::memset(small.data(), 1, 100);
  }
}

}  // namespace
}  // namespace awqd
