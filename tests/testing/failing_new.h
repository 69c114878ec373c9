// Allocations of C++ that fail on request, or are counted. Whatever links it has operator new
// replaced.
#pragma once

#include <cstdint>

namespace awqd::testing {

// Within its scope the `number`-th operator new of this thread throws std::bad_alloc, from 1 on.
class FailingNew {
 public:
  explicit FailingNew(int64_t number);
  ~FailingNew();
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;

  // Whether it came to that.
  bool failed() const;
};

// Bytes that this thread allocates from its construction on and has not freed.
class CountedNew {
 public:
  CountedNew();
  CountedNew(const CountedNew&) = delete;
  CountedNew& operator=(const CountedNew&) = delete;

  int64_t peak_mib() const;  // the most at a time
};

}  // namespace awqd::testing
