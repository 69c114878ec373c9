// The services of awqd.v1: each puts its methods on the loop. `env` outlives the server.
#pragma once

#include "server/services/env.h"
#include "server/transport/call.h"
#include "server/transport/call_loop.h"

namespace awqd::services {

// Each method starts a call object that answers by itself. Methods see messages as gRPC received
// them and make the bytes of their answers: payloads are then copied once on the way in and not at
// all on the way out, and a message that does not parse is answered by us.
void ServeInference(const Env& env, transport::CallLoop* loop);

// Over ModelStore. Loads run on a worker, never on the loop's threads, and go on when their client
// goes away: what it set out to do stays wanted. Lists look at the disk and run on a worker too,
// one of their own, so that they do not wait for loads.
void ServeModelRepository(const Env& env, transport::CallLoop* loop);

// Version, device, kernel rows, limits.
void ServeServerInfo(const Env& env, transport::CallLoop* loop);

// The calls of the inference service that have a file of their own. They own themselves until gRPC
// is done with them.
void StartDequantizeStream(const Env& env, transport::WriteCall* call);
void StartQuantizeKv(const Env& env, transport::UnaryCall* call);
void StartDequantizeKv(const Env& env, transport::UnaryCall* call);

}  // namespace awqd::services
