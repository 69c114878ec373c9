// Advice to back large host memory with huge pages: fresh memory then costs one fault per 2 MiB.
#pragma once

#include <sys/mman.h>

#include <cstdint>

#include "kernels/base/math.h"

namespace awqd {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// Give it before the memory is touched. Advice only: without huge pages everything works, more
// slowly.
inline void AdviseHugePages(void* data, int64_t bytes) {
  constexpr int64_t kPage = 4096;
  const int64_t skip =
      RoundUp(reinterpret_cast<intptr_t>(data), kPage) - reinterpret_cast<intptr_t>(data);
  const int64_t whole = (bytes - skip) / kPage * kPage;
  if (whole >= kHugePageBytes) {
    (void)madvise(static_cast<char*>(data) + skip, whole, MADV_HUGEPAGE);
  }
}

}  // namespace awqd
