// When the server is idle, and what it then gives back.
#include "server/idle_memory.h"

#include <time.h>

#if defined(AWQD_JEMALLOC)
#include <jemalloc/jemalloc.h>

// Read by jemalloc before main. A thread's cache is out of reach of every other thread, also when
// its owner sleeps for good: with blocks up to 32 KiB in it, the default, the idle server held 39
// MB instead of 35.
const char* malloc_conf = "tcache_max:1024";
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
