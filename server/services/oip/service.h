// The inference protocol on this server: inference.GRPCInferenceService, whose models are weights.
//
// It computes nothing by a way of its own: a request becomes one of awqd.v1 in its codec, and goes
// through the same flow.
#pragma once

#include "server/services/env.h"
#include "server/transport/call_loop.h"

namespace awqd::services::oip {

// Puts every method on the loop. `env` outlives the server.
void Serve(const Env& env, transport::CallLoop* loop);

}  // namespace awqd::services::oip
