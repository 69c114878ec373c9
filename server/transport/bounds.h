// The bounds and timers of the gRPC server, apart from its services, so that a bench can build a
// server without services of ours that costs exactly as much.
#pragma once

#include "grpcpp/server_builder.h"
#include "server/transport/options.h"

namespace awqd::transport {

// Everything that keeps one client from taking the whole process: message sizes, compression,
// memory quota, streams per connection, keepalive and age of connections.
void ApplyOptions(const Options& options, grpc::ServerBuilder* builder);

}  // namespace awqd::transport
