// Which memory of a machine of several sockets (NUMA nodes) pages lie in.
#pragma once

#include <cstdint>

namespace awqd {

// Pages that are touched from now on go round the nodes that the process may use, one after the
// other. `data` begins on a page. False where the system refuses: it was built without NUMA, or a
// container forbids it. Then everything works, from whichever node touches a page first.
bool InterleavePages(void* data, int64_t bytes);

}  // namespace awqd
