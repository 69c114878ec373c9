// How much memory this machine, or the container around the process, has and has left.
#pragma once

#include <cstdint>
#include <string>

namespace awqd {

// `root` is where /proc and /sys lie; tests have their own.

// Physical memory, or the cgroup's limit where that is less; 0 when neither can be read.
int64_t TotalMemoryBytes(const std::string& root = "");

// What can still be allocated without swapping: MemAvailable, or what the cgroup's limit leaves
// where that is less. Files that the kernel keeps in memory and has not used again, such as the
// checkpoint that was just read, count as free there, because it drops them first. The largest
// number when nothing can be read (no file descriptor left, say): then only the allocator can
// say.
int64_t AvailableMemoryBytes(const std::string& root = "");

}  // namespace awqd
