// Advises the kernel to use huge pages, trims mappings to their alignment, and sets policies of
// NUMA nodes. The last takes two system calls: libnuma would be a dependency for a mask and a call.
#include "kernels/base/host_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/base/math.h"

namespace awqd {
namespace {

// The largest number of nodes of any kernel (CONFIG_NODES_SHIFT is at most 10).
constexpr unsigned long kMaxNodes = 1024;
constexpr unsigned long kBitsOfWord = 8 * sizeof(unsigned long);

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

bool InterleavePages(void* data, int64_t bytes) {
  unsigned long nodes[kMaxNodes / kBitsOfWord] = {};
  if (syscall(SYS_get_mempolicy, nullptr, nodes, kMaxNodes, nullptr, MPOL_F_MEMS_ALLOWED) != 0) {
    return false;
  }
  // The kernel subtracts one from the number of bits.
  return syscall(SYS_mbind, data, bytes, MPOL_INTERLEAVE, nodes, kMaxNodes + 1, 0) == 0;
}

}  // namespace awqd
