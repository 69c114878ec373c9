// How many threads of the machine this process may keep busy.
#pragma once

namespace awqd {

// Those of its affinity mask, capped by a cgroup's CPU quota. At least 1.
int UsableThreads();

}  // namespace awqd
