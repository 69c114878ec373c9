// ParallelFor: the iterations of a loop at the same time, for iterations of milliseconds and more.
#pragma once

#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace awqd {

// Calls body(i) once for every i in [0, count), each on a thread of its own, body(0) on the calling
// one, and waits for all. Iterations for which the process can start no thread run on the calling
// thread. `body` does not throw.
inline void ParallelFor(size_t count, absl::FunctionRef<void(size_t)> body) {
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (size_t i = 1; i < count; ++i) {
    try {
      threads.emplace_back(body, i);
    } catch (const std::exception&) {
      body(i);
    }
  }
  if (count > 0) body(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace awqd
