// How many threads of the machine this process may keep busy.
#pragma once

#include <vector>

namespace awqd {

// The cores of the process's affinity mask, ascending; empty where the system does not say.
std::vector<int> UsableCores();

// As many as it has cores, capped by a cgroup's CPU quota. At least 1.
int UsableThreads();

}  // namespace awqd
