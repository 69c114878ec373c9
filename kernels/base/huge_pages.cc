// Advises the kernel to use huge pages, and trims mappings to their alignment.
#include "kernels/base/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include "kernels/base/math.h"

namespace awqd {
namespace {

// 4 KiB on x86-64; 4, 16 or 64 KiB on aarch64, as its kernel was built. The kernel refuses advice
// and unmapping that begin elsewhere.
int64_t PageBytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

}  // namespace

void AdviseHugePages(void* data, int64_t bytes) {
  const int64_t page = PageBytes();
  const int64_t skip =
      RoundUp(reinterpret_cast<intptr_t>(data), page) - reinterpret_cast<intptr_t>(data);
  const int64_t whole = (bytes - skip) / page * page;
  if (whole >= kHugePageBytes) {
    (void)madvise(static_cast<char*>(data) + skip, whole, MADV_HUGEPAGE);
  }
}

void* MapHugePages(int64_t bytes) {
  if (bytes > INT64_MAX - 2 * kHugePageBytes) return nullptr;
  const int64_t page = PageBytes(), wanted = RoundUp(bytes, page);
  // Long enough to contain an aligned piece of `wanted` bytes; the rest is unmapped at once.
  const int64_t mapped = wanted + kHugePageBytes - page;
  void* const begin =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  const auto address = reinterpret_cast<intptr_t>(begin);
  const int64_t head = RoundUp(address, kHugePageBytes) - address;
  char* const data = static_cast<char*>(begin) + head;
  if (head > 0) munmap(begin, head);
  if (const int64_t tail = mapped - head - wanted; tail > 0) munmap(data + wanted, tail);
  AdviseHugePages(data, bytes);
  return data;
}

void UnmapHugePages(void* data, int64_t bytes) { munmap(data, RoundUp(bytes, PageBytes())); }

}  // namespace awqd
