// Calls the two system calls directly: libnuma would be a dependency for a mask and a call.
#include "kernels/base/memory_nodes.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace awqd {
namespace {

// The largest number of nodes of any kernel (CONFIG_NODES_SHIFT is at most 10).
constexpr unsigned long kMaxNodes = 1024;
constexpr unsigned long kBitsOfWord = 8 * sizeof(unsigned long);

}  // namespace

bool InterleavePages(void* data, int64_t bytes) {
  unsigned long nodes[kMaxNodes / kBitsOfWord] = {};
  if (syscall(SYS_get_mempolicy, nullptr, nodes, kMaxNodes, nullptr, MPOL_F_MEMS_ALLOWED) != 0) {
    return false;
  }
  // The kernel subtracts one from the number of bits.
  return syscall(SYS_mbind, data, bytes, MPOL_INTERLEAVE, nodes, kMaxNodes + 1, 0) == 0;
}

}  // namespace awqd
