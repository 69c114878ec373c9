// ParallelFor: the iterations of a loop at the same time, for iterations of milliseconds and more;
// ForEachPart: parts of a loop over memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/base/math.h"

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

// Calls body(begin, end) for parts of [0, count) that begin at multiples of `step`, on a few
// threads as ParallelFor does. `bytes`: what all parts read or write. Loading must not use the
// threads that serve requests.
inline void ForEachPart(int64_t count, int64_t step, int64_t bytes,
                        absl::FunctionRef<void(int64_t begin, int64_t end)> body) {
  constexpr int64_t kBytesPerThread = int64_t{4} << 20;  // many times what starts a thread
  constexpr int64_t kMaxThreads = 8;                     // more threads would wait for memory
  const int64_t steps = CeilDiv(count, step), cores = std::thread::hardware_concurrency();
  const int64_t parts =
      std::clamp<int64_t>(std::min({bytes / kBytesPerThread, steps, cores}), 1, kMaxThreads);
  ParallelFor(static_cast<size_t>(parts), [&](size_t part) {
    const auto i = static_cast<int64_t>(part);
    body(steps * i / parts * step, std::min(count, steps * (i + 1) / parts * step));
  });
}

}  // namespace awqd
