// C++ allocations that fail on request, or are counted. Programs that link it have another operator
// new.
#pragma once

#include <cstdint>

namespace awqd::testing {

// While it exists, the `number`-th operator new of this thread, from 1, throws std::bad_alloc.
class FailingNew {
 public:
  explicit FailingNew(int64_t number);
  ~FailingNew();
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;

  // Whether an allocation failed.
  bool failed() const;
};

// The bytes that this thread has allocated since its construction and has not freed.
class CountedNew {
 public:
  CountedNew();
  CountedNew(const CountedNew&) = delete;
  CountedNew& operator=(const CountedNew&) = delete;

  int64_t peak_mib() const;  // the peak
};

}  // namespace awqd::testing
