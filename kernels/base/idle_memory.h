// Returns free memory to the system when the server becomes idle.
//
// An allocator keeps freed memory, so after a burst of large messages a process looks as if it had
// leaked. While requests arrive, it is right to reuse that memory; an idle server can return it.
//
// The allocator is jemalloc. The C library's malloc_trim cannot return the end of any arena but the
// first, which is megabytes each after large messages: the idle server's resident memory was
// anywhere between 41 and 46 MB, and is 35 MB within 1 % with jemalloc. A single arena
// (M_ARENA_MAX) would also help, but has one lock for all threads. CPU time for a request relative
// to the C library's defaults, 32 callers on 2 cores that others used too, median of 7 rounds: one
// arena 1.06, jemalloc 0.98 (2026-11-21).
#pragma once

#include "absl/time/time.h"

namespace awqd {

// Decides when to return memory. Pure: it is given the time and the CPU time of the process. Not
// thread-safe.
class IdleWatch {
 public:
  // Processor time after which freed memory is worth returning.
  static constexpr absl::Duration kWork = absl::Milliseconds(100);
  // Idle means less than kQuietWork of one processor over kQuiet.
  static constexpr absl::Duration kQuiet = absl::Seconds(1);
  static constexpr absl::Duration kQuietWork = absl::Milliseconds(30);

  // Call it several times in kQuiet. Returns true once after each period of work, when it has
  // ended.
  bool Tick(absl::Time now, absl::Duration processor_time);

 private:
  absl::Duration worked_;  // since the last true, without quiet times
  absl::Time quiet_since_ = absl::InfinitePast();
  absl::Duration quiet_from_;  // CPU time at quiet_since_
};

// The processor time of this process, over all its threads.
absl::Duration ProcessorTime();

// Returns unused memory of the allocator to the system. It takes milliseconds to tens of
// milliseconds, and other threads may wait that long for an allocation.
void ReturnFreeMemory();

}  // namespace awqd
