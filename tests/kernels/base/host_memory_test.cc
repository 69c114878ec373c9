// Mappings for large buffers: aligned, zeroed, and gone once they are unmapped. And the system's
// policy of interleaved pages.
#include "kernels/base/host_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backends.h"

namespace awqd {
namespace {

// Whether every page of the mapping is mapped.
bool IsMapped(void* data, int64_t bytes) {
  std::vector<unsigned char> resident((bytes + 4095) / 4096);
  if (mincore(data, bytes, resident.data()) == 0) return true;
  EXPECT_EQ(errno, ENOMEM);
  return false;
}

TEST(HugePagesTest, AMappingIsAlignedAndGoesBackToTheSystem) {
  // Several mappings exist at once, so that the system's choice of addresses does not align them by
  // itself.
  std::vector<std::pair<char*, int64_t>> maps;
  for (int64_t bytes : {int64_t{1}, int64_t{4097}, kHugePageBytes, 3 * kHugePageBytes + 5}) {
    maps.emplace_back(static_cast<char*>(MapHugePages(bytes)), bytes);
    ASSERT_NE(maps.back().first, nullptr) << bytes;
  }
  for (auto [data, bytes] : maps) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % kHugePageBytes, 0u) << bytes;
    EXPECT_EQ(data[0], 0);
    data[0] = data[bytes - 1] = 1;
    EXPECT_TRUE(IsMapped(data, bytes));
    UnmapHugePages(data, bytes);
    EXPECT_FALSE(IsMapped(data, bytes)) << bytes;
  }
}

TEST(HugePagesTest, ThereIsNoRoomForEverything) {
  EXPECT_EQ(MapHugePages(int64_t{1} << 50), nullptr);
  EXPECT_EQ(MapHugePages(INT64_MAX), nullptr);
}

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
    const auto device = OpenCpuDevice({.cpu_threads = 1, .cpu_interleave = interleave});
    const Buffer large = device->Allocate(MemoryKind::kDevice, 2 * kHugePageBytes).value();
    EXPECT_EQ(PolicyOf(large.data()) == MPOL_INTERLEAVE, interleave);
    const Buffer small = device->Allocate(MemoryKind::kDevice, 100).value();
    std::memset(small.data(), 1, 100);
  }
}

}  // namespace
}  // namespace awqd
