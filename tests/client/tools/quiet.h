// For tests of tools that report their progress.
#pragma once

#include <cstdint>

namespace awqd::tools {

inline void Quiet(int64_t, int64_t) {}

}  // namespace awqd::tools
