// Threads that take the next number from a counter, with one arena of jemalloc for all loads, which
// keeps what is freed.
#include "server/model/readers.h"

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <optional>
#include <utility>

#include "kernels/base/mutex.h"
#include "kernels/base/parallel_for.h"

// The function of jemalloc, where that is the allocator of the process; else null.
extern "C" int mallctl(const char* name, void* old_value, size_t* old_size, void* new_value,
                       size_t new_size) __attribute__((weak));

namespace awqd::model {
namespace {

struct Loads {
  Mutex mu;
  std::optional<unsigned> arena;  // of the first load on
  int threads = 0;                // that use it
};

// Nothing here allocates: threads begin and end with it.
Loads loads;

template <typename T>
bool Set(const char* name, T value) {
  return mallctl(name, nullptr, nullptr, &value, sizeof(value)) == 0;
}

// A setting of the arena, or what can be done with it.
struct OfArena {
  OfArena(unsigned arena, const char* what) {
    std::snprintf(name, sizeof(name), "arena.%u.%s", arena, what);
  }
  char name[48];
};

// Freed memory never decays, and blocks of any size come from this arena.
std::optional<unsigned> CreateArena() {
  unsigned arena = 0;
  size_t size = sizeof(arena);
  if (mallctl("arenas.create", &arena, &size, nullptr, 0) != 0) return std::nullopt;
  Set<ssize_t>(OfArena(arena, "dirty_decay_ms").name, -1);
  Set<size_t>(OfArena(arena, "oversize_threshold").name, SIZE_MAX / 4);
  return arena;
}

}  // namespace

LoadMemory::LoadMemory() {
  if (mallctl == nullptr) return;
  MutexLock lock(&loads.mu);
  if (!loads.arena) loads.arena = CreateArena();
  if (!loads.arena) return;
  size_t size = sizeof(before_);
  unsigned arena = *loads.arena;
  switched_ = mallctl("thread.arena", &before_, &size, &arena, sizeof(arena)) == 0;
  if (switched_) ++loads.threads;
}

LoadMemory::~LoadMemory() {
  if (!switched_) return;
  MutexLock lock(&loads.mu);
  Set<unsigned>("thread.arena", before_);
  if (--loads.threads > 0) return;
  mallctl(OfArena(*loads.arena, "purge").name, nullptr, nullptr, nullptr, 0);
}

absl::Status RunOnReaders(int readers, int64_t count,
                          absl::FunctionRef<absl::Status(int reader, int64_t i)> work) {
  std::atomic<int64_t> next{0};
  Mutex mu;
  int64_t first_failure = count;
  absl::Status status;
  std::exception_ptr thrown;
  ParallelFor(readers, [&](size_t thread) {
    const auto reader = static_cast<int>(thread);
    const LoadMemory memory;
    for (int64_t i = next++; i < count; i = next++) {
      absl::Status ended;
      std::exception_ptr exception;
      try {
        ended = work(reader, i);
      } catch (const std::exception&) {
        exception = std::current_exception();
      }
      if (ended.ok() && exception == nullptr) continue;
      next = count;
      MutexLock lock(&mu);
      if (i >= first_failure) continue;
      first_failure = i;
      status = std::move(ended);
      thrown = std::move(exception);
    }
  });
  if (thrown != nullptr) std::rethrow_exception(thrown);
  return status;
}

}  // namespace awqd::model
