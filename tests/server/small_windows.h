// Clients that let little of what they do not read through.
#pragma once

#include "grpcpp/support/channel_arguments.h"

namespace awqd {

// 64 KiB a stream. gRPC itself asks for 64 KiB or 4 MiB, by what it makes of the connection, so
// tests of answers that nobody takes say how much they let through.
inline grpc::ChannelArguments SmallWindows() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65535);
  return arguments;
}

}  // namespace awqd
