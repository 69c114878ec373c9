// Collect: what every room has counted, gathered at the moment when somebody wants to see it.
#pragma once

#include "server/obs/snapshot.h"
#include "server/services/env.h"

namespace awqd::services {

enum class Plans { kLeftOut, kIncluded };

// `plans`: also which kernels serve each model, a walk over all of its weights. Thread-safe; takes
// no lock for longer than a copy. `serving` is left to the caller.
obs::Snapshot Collect(const Env& env, Plans plans);

}  // namespace awqd::services
