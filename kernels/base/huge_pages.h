// Large host memory with huge pages: fresh memory then costs one fault per 2 MiB.
#pragma once

#include <cstdint>

namespace awqd {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// Advises huge pages for memory that was not touched yet. Advice only: without huge pages
// everything works, more slowly.
void AdviseHugePages(void* data, int64_t bytes);

// A mapping of its own, zeros, aligned to kHugePageBytes and advised; `bytes` > 0. Null when the
// system has no room.
void* MapHugePages(int64_t bytes);
// `data` from MapHugePages of as many bytes; the memory goes back to the system.
void UnmapHugePages(void* data, int64_t bytes);

}  // namespace awqd
