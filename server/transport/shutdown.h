// The end of a gRPC server: what its clients see of it, and how long it may take.
#pragma once

#include "absl/time/time.h"
#include "grpcpp/server.h"
#include "server/transport/acceptor.h"
#include "server/transport/drain.h"

namespace awqd::transport {

// Returns when no call is in flight and every connection is closed.
//
// - Calls in flight go on until `deadline`, then they are cancelled.
// - What ends meanwhile ends once its client has had time to read its messages (Admission::LastWords).
// - New calls are answered UNAVAILABLE, on connections that have been told to go away.
// - Once no call is in flight, clients have a moment to close; then connections are closed under
//   them. Without that, an idle client that does not look at its connection (a synchronous one
//   between two calls) would hold the end back for the 20 s that gRPC waits for it, and so would
//   one that has not sent its settings.
//
// With a `deadline` that has passed, everything is cancelled at once.
//
// `acceptor` is stopped, after the last connection that may still bring a call.
void ShutDown(grpc::Server* server, Drain* gate, Acceptor* acceptor, absl::Time deadline);

// True when no TCP connection of this process holds bytes that the peer's kernel has not
// acknowledged: closing one that does may lose them. Unix domain sockets have nothing on the way.
bool AllSent();

}  // namespace awqd::transport
