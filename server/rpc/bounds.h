// The bounds and timers of the gRPC server, apart from its services, so that a bench can build a
// server without services of ours that costs exactly as much.
#pragma once

#include "grpcpp/server_builder.h"
#include "server/rpc/rpc_server.h"

namespace awqd {

// Everything that keeps one client from taking the whole process: message sizes, compression,
// memory and thread quota, streams per connection, keepalive and age of connections.
void SetBounds(const RpcOptions& options, grpc::ServerBuilder* builder);

}  // namespace awqd
