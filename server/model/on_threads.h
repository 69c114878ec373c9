// OnThreads: the same for several devices, or several linears, at the same time.
#pragma once

#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace awqd::model {

// Calls body(i) once for every i in [0, count), each on a thread of its own, and waits for all.
// `body` does not throw.
inline void OnThreads(size_t count, absl::FunctionRef<void(size_t)> body) {
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (size_t i = 1; i < count; ++i) {
    try {
      threads.emplace_back(body, i);
    } catch (const std::exception&) {  // the process may start no more
      body(i);
    }
  }
  if (count > 0) body(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace awqd::model
