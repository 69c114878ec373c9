// gRPC's own messages, which name its source files and are for debugging it: debug lines of ours.
#pragma once

namespace awqd::transport {

// For the whole process, before gRPC is used. Once is enough, more does no harm.
void TakeOverGrpcLog();

}  // namespace awqd::transport
