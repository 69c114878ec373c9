// Large host memory: huge pages, with which fresh memory costs one fault per 2 MiB, and pages that
// are interleaved over the memory of several sockets (NUMA nodes).
#pragma once

#include <cstdint>

namespace awqd {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// Advises huge pages for memory that was not touched yet. Without huge pages everything works, but
// more slowly.
void AdviseHugePages(void* data, int64_t bytes);

// Maps zeroed memory that is aligned to kHugePageBytes and advised; `bytes` > 0. Returns null if
// the system has no room.
void* MapHugePages(int64_t bytes);
// Unmaps `data` from MapHugePages(bytes), which returns the memory to the system.
void UnmapHugePages(void* data, int64_t bytes);

// Interleaves the pages that are touched from now on over the nodes that the process may use.
// `data` begins on a page. Returns false if the system refuses, because it was built without NUMA
// or a container forbids it. Pages then lie on the node that touches them first.
bool InterleavePages(void* data, int64_t bytes);

}  // namespace awqd
