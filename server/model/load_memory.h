// LoadMemory: a thread of a load allocates again what it has freed.
//
// A load allocates and frees tens of megabytes for each linear. An allocator gives such blocks back
// to the system, which clears every page before it hands it out again: that was half of the
// processor time of a load from the page cache.
#pragma once

namespace awqd::model {

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
