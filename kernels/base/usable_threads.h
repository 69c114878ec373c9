// The number of threads that this process may keep busy.
#pragma once

#include <vector>

namespace awqd {

// The cores of the process's affinity mask, ascending; empty if the system does not tell.
std::vector<int> UsableCores();

// The number of usable cores, capped by a cgroup's CPU quota. At least 1.
int UsableThreads();

}  // namespace awqd
