// The memory, cores and threads that the machine, or the container around it, allows the process;
// and the descriptors that every process should have.
//
// Limits of cgroups are those of the process's own cgroup and of all above it that it can see, of
// version 1 and 2.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace awqd {

// `root`: the folder of /proc and /sys; tests have their own.

// Physical memory, or the least limit of a cgroup if that is smaller; 0 if neither can be read.
int64_t TotalMemoryBytes(const std::string& root = "");

// Memory that can be allocated without swapping: MemAvailable, or the least rest of a cgroup's limit
// if that is smaller. Pages of files that were read once, such as a checkpoint's, count as free,
// because the kernel drops them first. Returns the largest number if nothing can be read, for
// example without a free file descriptor; then only the allocator can tell.
int64_t ReadAvailableMemoryBytes(const std::string& root);
// The same of this system, up to 10 ms old.
int64_t AvailableMemoryBytes();

// The cores of the process's affinity mask, ascending; empty if the system does not tell.
std::vector<int> UsableCores();

// The number of usable cores, capped by the least CPU quota of a cgroup. At least 1.
int UsableThreads(const std::string& root = "");

// Starts `count` threads at the same time, and ends them. RESOURCE_EXHAUSTED when the limits of
// processes or memory do not allow them: gRPC waits forever for a thread that it cannot start. The
// same of `buffer_bytes` of address space beside them, for which OpenBLAS waits forever.
absl::Status TryThreads(int count, int64_t buffer_bytes = 0);

// The same for descriptors: gRPC ends the process where it gets none. Descriptor 0 is open.
absl::Status TryDescriptors(int count);

// Opens /dev/null as each of the descriptors 0 to 2 that is closed. Without this the next file or
// connection has such a number, and what is meant for stdout or stderr is written to it. May be
// called before libraries are initialised.
void OpenStandardDescriptors();

}  // namespace awqd
