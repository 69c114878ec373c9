// operator new over malloc, with counts for each thread.
#include "tests/testing/failing_new.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace awqd::testing {
namespace {

thread_local int64_t left = 0;  // until one fails; 0: none will
thread_local bool has_failed = false;
thread_local int64_t held = 0, most_held = 0;

void* Allocate(size_t size, size_t alignment) {
  if (left > 0 && --left == 0) {
    has_failed = true;
    throw std::bad_alloc();
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, size == 0 ? 1 : size) != 0) throw std::bad_alloc();
  held += static_cast<int64_t>(malloc_usable_size(memory));
  most_held = std::max(most_held, held);
  return memory;
}

void Free(void* memory) {
  held -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

FailingNew::FailingNew(int64_t number) {
  has_failed = false;
  left = number;
}

FailingNew::~FailingNew() { left = 0; }

bool FailingNew::failed() const { return has_failed; }

CountedNew::CountedNew() { held = most_held = 0; }

int64_t CountedNew::peak_mib() const { return most_held >> 20; }

}  // namespace awqd::testing

using awqd::testing::Allocate;
using awqd::testing::Free;

void* operator new(size_t size) { return Allocate(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new[](size_t size) { return Allocate(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<size_t>(alignment));
}
void* operator new[](size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { Free(memory); }
void operator delete[](void* memory) noexcept { Free(memory); }
void operator delete(void* memory, size_t) noexcept { Free(memory); }
void operator delete[](void* memory, size_t) noexcept { Free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { Free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { Free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { Free(memory); }
