// How much memory this machine, or the container around the process, has and has left.
#pragma once

#include <cstdint>
#include <string>

namespace awqd {

// `root`: the folder of /proc and /sys; tests have their own.

// Physical memory, or the cgroup's limit if that is smaller; 0 if neither can be read.
int64_t TotalMemoryBytes(const std::string& root = "");

// Memory that can be allocated without swapping: MemAvailable, or the rest of the cgroup's limit if
// that is smaller. Pages of files that were read once, such as a checkpoint's, count as free,
// because the kernel drops them first. Returns the largest number if nothing can be read, for
// example without a free file descriptor; then only the allocator can tell.
int64_t AvailableMemoryBytes(const std::string& root = "");

}  // namespace awqd
