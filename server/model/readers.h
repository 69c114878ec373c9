// RunOnReaders: reads the linears of a load, some at a time; LoadMemory: a thread of a load allocates
// again what it has freed.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace awqd::model {

// Calls work(reader, i) once for every i in [0, count), begun in ascending order, on up to
// `readers` threads, one of them the calling one. `reader` is the number of the thread, from 0.
// After an error or an exception no call is begun. The error of the least i is returned, or its
// exception thrown.
absl::Status RunOnReaders(int readers, int64_t count,
                          absl::FunctionRef<absl::Status(int reader, int64_t i)> work);

// A load allocates and frees tens of megabytes for each linear. An allocator gives such blocks back
// to the system, which clears every page before it hands it out again: that was half of the
// processor time of a load from the page cache.
//
// While one lives, what the calling thread frees is kept for what it allocates next; the last one
// of the process gives all of it back. Lives and ends on one thread. Does nothing in a process
// whose allocator is not jemalloc.
class LoadMemory {
 public:
  LoadMemory();
  ~LoadMemory();
  LoadMemory(const LoadMemory&) = delete;
  LoadMemory& operator=(const LoadMemory&) = delete;

 private:
  unsigned before_ = 0;    // the thread's own arena
  bool switched_ = false;  // to that of loads
};

}  // namespace awqd::model
