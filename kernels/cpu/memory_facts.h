// How much memory this machine, or the container around the process, has and has left.
#pragma once

#include <cstdint>

namespace awqd {

// Physical memory, or the cgroup's limit where that is less.
int64_t TotalMemoryBytes();

// What can still be allocated without swapping: MemAvailable, or what the cgroup's limit leaves
// where that is less.
int64_t AvailableMemoryBytes();

}  // namespace awqd
