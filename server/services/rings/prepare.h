// Prepared calls of rings: a request of awqd.v1 without its tensors, which a slot completes.
#pragma once

#include <memory>

#include "server/ring/ring_server.h"
#include "server/services/env.h"

namespace awqd::services::rings {

// Makes the server of rings, whose calls go through the handlers of awqd.v1's methods. Before the
// gRPC server starts. `env` outlives it.
std::unique_ptr<ring::RingServer> MakeServer(const Env& env);

}  // namespace awqd::services::rings
