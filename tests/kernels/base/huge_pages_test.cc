// Mappings for large buffers: aligned, zeroed, and gone once they are unmapped.
#include "kernels/base/huge_pages.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

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

}  // namespace
}  // namespace awqd
