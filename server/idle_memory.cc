// When the server is idle, and what it then gives back.
#include "server/idle_memory.h"

#include <malloc.h>
#include <time.h>

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

void ReturnFreeMemory() { malloc_trim(0); }

}  // namespace awqd
