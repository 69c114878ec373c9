// Allocations that fail: C's return null, C++'s throw.
#include <cerrno>
#include <new>

#include "tests/sweeps/shim.h"

using awqd::sweeps::Fails;
using awqd::sweeps::kMemory;
using awqd::sweeps::Next;

namespace {

template <typename F, typename... Args>
void* OrNull(F* real, const char* name, Args... args) {
  if (Fails(kMemory, name)) {
    errno = ENOMEM;
    return nullptr;
  }
  return real(args...);
}

template <typename F, typename... Args>
void* OrThrow(F* real, Args... args) {
  if (Fails(kMemory, "operator new")) throw std::bad_alloc();
  return real(args...);
}

}  // namespace

extern "C" {

void* malloc(size_t size) noexcept {
  static const auto real = Next<void*(size_t)>("malloc");
  return OrNull(real, "malloc", size);
}
void* calloc(size_t count, size_t size) noexcept {
  static const auto real = Next<void*(size_t, size_t)>("calloc");
  return OrNull(real, "calloc", count, size);
}
void* realloc(void* old, size_t size) noexcept {
  static const auto real = Next<void*(void*, size_t)>("realloc");
  return OrNull(real, "realloc", old, size);
}
void* aligned_alloc(size_t alignment, size_t size) noexcept {
  static const auto real = Next<void*(size_t, size_t)>("aligned_alloc");
  return OrNull(real, "aligned_alloc", alignment, size);
}
int posix_memalign(void** out, size_t alignment, size_t size) noexcept {
  static const auto real = Next<int(void**, size_t, size_t)>("posix_memalign");
  return Fails(kMemory, "posix_memalign") ? ENOMEM : real(out, alignment, size);
}

}  // extern "C"

void* operator new(size_t size) {
  static const auto real = Next<void*(size_t)>("_Znwm");
  return OrThrow(real, size);
}
void* operator new[](size_t size) {
  static const auto real = Next<void*(size_t)>("_Znam");
  return OrThrow(real, size);
}
void* operator new(size_t size, std::align_val_t alignment) {
  static const auto real = Next<void*(size_t, std::align_val_t)>("_ZnwmSt11align_val_t");
  return OrThrow(real, size, alignment);
}
void* operator new(size_t size, const std::nothrow_t& tag) noexcept {
  static const auto real = Next<void*(size_t, const std::nothrow_t&)>("_ZnwmRKSt9nothrow_t");
  return Fails(kMemory, "operator new(nothrow)") ? nullptr : real(size, tag);
}
