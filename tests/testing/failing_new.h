// Allocations of C++ that fail on request. Whatever links it has operator new replaced.
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

}  // namespace awqd::testing
