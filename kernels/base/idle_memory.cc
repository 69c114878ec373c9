// Detects that the server is idle, and returns unused memory.
#include "kernels/base/idle_memory.h"

#include <time.h>

#if defined(AWQD_JEMALLOC)
#include <jemalloc/jemalloc.h>

// jemalloc reads this before main. It limits threads' caches to small blocks, because no thread can
// empty the cache of another, even if that sleeps forever: with blocks up to 32 KiB, the default,
// the idle server held 39 MB instead of 35.
// It also limits the number of arenas. By default there are four for each core, and a thread takes
// one that no other thread uses. gRPC adds threads as load peaks, up to twice the number of cores,
// and keeps them: on 16 cores, 21 more threads between the first and the last of 1.5 million calls
// took 7.9 MB, and 3.8 MB with eight arenas. Throughput was the same (256 callers, 16 cores and an
// H100, in turns: 67.6, 69.4 and 66.2 thousand requests a second with eight, 66.3, 67.2 and 61.6
// with 64; 2026-11-26).
const char* malloc_conf = "tcache_max:1024,narenas:8";
#endif

namespace awqd {

bool IdleWatch::Tick(absl::Time now, absl::Duration processor_time) {
  const absl::Duration used = processor_time - quiet_from_;
  const bool working = used >= kQuietWork;
  if (!working && now - quiet_since_ < kQuiet) return false;
  quiet_since_ = now;
  quiet_from_ = processor_time;
  if (working) {
    worked_ += used;
    return false;
  }
  if (worked_ < kWork) return false;
  worked_ = absl::ZeroDuration();
  return true;
}

absl::Duration ProcessorTime() {
  timespec used = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return absl::DurationFromTimespec(used);
}

void ReturnFreeMemory() {
#if defined(AWQD_JEMALLOC)
#define AWQD_TEXT(x) #x
#define AWQD_ARENA(index, action) "arena." AWQD_TEXT(index) "." action
  mallctl("thread.tcache.flush", nullptr, nullptr, nullptr, 0);
  mallctl(AWQD_ARENA(MALLCTL_ARENAS_ALL, "purge"), nullptr, nullptr, nullptr, 0);
#undef AWQD_ARENA
#undef AWQD_TEXT
#endif
}

}  // namespace awqd
