// Clients with small flow-control windows.
#pragma once

#include "grpcpp/support/channel_arguments.h"

namespace awqd {

// 64 KiB a stream. gRPC itself chooses 64 KiB or 4 MiB by its measurements of the connection, so
// tests of unread answers set the window.
inline grpc::ChannelArguments SmallWindows() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 65535);
  return arguments;
}

}  // namespace awqd
