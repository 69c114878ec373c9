// What a test and the failing server that it started share: a page of memory in a file, which
// AWQD_TEST_FAULTS names. The shim (shim_*.cc), preloaded into the server, does what it says.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace awqd::sweeps {

enum Kind : uint32_t {
  kNothing = 0,
  kFiles,   // open, stat, read and list beneath the repository; mmap of files and by awqd itself
  kMemory,  // malloc, operator new and their kin, whoever calls them
  // Those of kMemory that awqd itself asks for, also through C++, Abseil and Protocol Buffers.
  kOwnMemory,
};

// How a call of kFiles fails beside its errno: a read gives half of what it could, or nothing.
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
  // Of memory: the shared object that asked for it, the innermost that passes failures on to
  // nobody, and all that called, innermost first.
  char asked_by[64], callers[512];
  std::atomic<int64_t> clock_shift_ns;  // added to the time of day
  std::atomic<int> stalled_thread;      // this thread next sleeps for stall_ns, once
  std::atomic<int64_t> stall_ns;
  std::atomic<int64_t> stalls;
};

}  // namespace awqd::sweeps
