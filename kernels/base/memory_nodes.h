// Interleaves pages over the memory of a machine of several sockets (NUMA nodes).
#pragma once

#include <cstdint>

namespace awqd {

// Interleaves the pages that are touched from now on over the nodes that the process may use.
// `data` begins on a page. Returns false if the system refuses, because it was built without NUMA
// or a container forbids it. Pages then lie on the node that touches them first.
bool InterleavePages(void* data, int64_t bytes);

}  // namespace awqd
