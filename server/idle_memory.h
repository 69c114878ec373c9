// Gives memory back to the system when the server comes to rest.
//
// The C library keeps what was freed in one arena per thread, between blocks that are still in use,
// and returns none of it by itself: after a burst of large messages a process looks as if it had
// leaked. While requests come, reusing that memory is right; returning it is work for an idle
// server.
#pragma once

#include "absl/time/time.h"

namespace awqd {

// Decides when. Pure: it is told the time and the processor time that the process has used.
// Not thread-safe.
class IdleWatch {
 public:
  // Work that is worth a look at the memory that it left.
  static constexpr absl::Duration kWork = absl::Milliseconds(100);
  // Idle: over kQuiet, less than kQuietWork of one processor.
  static constexpr absl::Duration kQuiet = absl::Seconds(1);
  static constexpr absl::Duration kQuietWork = absl::Milliseconds(30);

  // To be called several times in kQuiet. True once after each spell of work, when it is over.
  bool Tick(absl::Time now, absl::Duration processor_time);

 private:
  absl::Duration worked_;  // since the last yes, quiet times left out
  absl::Time quiet_since_ = absl::InfinitePast();
  absl::Duration quiet_from_;  // processor time at quiet_since_
};

// Of this process, over all its threads.
absl::Duration ProcessorTime();

// Returns what the C library keeps unused. Milliseconds to tens of milliseconds; other threads may
// wait that long for an allocation.
void ReturnFreeMemory();

}  // namespace awqd
