// The memory shared by a test and the failing server that it started: a page of a file, which
// AWQD_TEST_FAULTS names. The shim (shim_*.cc), preloaded into the server, obeys it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace awqd::sweeps {

enum Kind : uint32_t {
  kNothing = 0,
  kFiles,   // open, stat, read and list beneath the repository; mmap of files and by awqd itself
  kMemory,  // malloc, operator new and similar functions, for all callers
  // The calls of kMemory that awqd itself makes, also through C++, Abseil and Protocol Buffers.
  kOwnMemory,
};

// How a call of kFiles fails, besides its errno: a read returns half of the bytes, or none.
enum Twist : uint32_t { kErrno = 0, kShortRead, kEndOfFile };

struct Control {
  std::atomic<uint32_t> kind;
  std::atomic<uint32_t> twist;
  std::atomic<int> error;        // errno of the call that fails
  std::atomic<int64_t> fail_at;  // which call of the kind fails, from 1; 0: none
  std::atomic<int64_t> seen;     // calls of the kind since the test set it to 0
  std::atomic<int64_t> failed;   // and how many of them failed
  std::atomic<uint64_t> device;  // st_dev of the repository
  char repository[512];          // its path
  char where[512];               // the function that failed
  // For memory: the shared object that asked for it, the innermost that does not pass failures on,
  // and all callers, innermost first.
  char asked_by[64], callers[512];
  std::atomic<int64_t> clock_shift_ns;  // added to the time of day
  std::atomic<int> stalled_thread;      // this thread next sleeps for stall_ns, once
  std::atomic<int64_t> stall_ns;
  std::atomic<int64_t> stalls;
};

}  // namespace awqd::sweeps
