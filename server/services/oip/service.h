// The inference protocol on this server: inference.GRPCInferenceService, whose models are weights.
//
// It computes nothing by a way of its own: a request becomes one of awqd.v1 in its codec, and goes
// through the same handler.
#pragma once

#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "server/services/env.h"
#include "server/services/oip/regions.h"
#include "server/transport/call_loop.h"

namespace awqd::services::oip {

// Puts every method on the loop. `env` outlives the server.
void Serve(const Env& env, transport::CallLoop* loop);

// --- For the files of this folder ---

// ModelInfer and ModelStreamInfer.
void ServeInfer(const Env& env, const std::shared_ptr<Regions>& regions, transport::CallLoop* loop);
// "inference.GRPCInferenceService/METHOD".
std::string MethodPath(absl::string_view method);
// The owner of the regions that a call may use: its identity's name, or "".
std::string OwnerName(const transport::ServerCall& call);

}  // namespace awqd::services::oip
