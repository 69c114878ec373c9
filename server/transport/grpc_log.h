// gRPC's log becomes ours. Some events of clients are told there alone: they are counted, and
// logged at a limited rate.
#pragma once

#include <cstdint>

namespace awqd::transport {

// Redirects gRPC's log, for the whole process. Call it once, after grpc_init.
void PrepareGrpcLog();

// Failed TLS handshakes of all servers of the process.
int64_t FailedHandshakes();

// While it lives, handshakes that begin on this thread are with the other end of the connection
// `fd`, so that the log can say whose handshake failed.
class HandshakePeer {
 public:
  explicit HandshakePeer(int fd);
  ~HandshakePeer();
  HandshakePeer(const HandshakePeer&) = delete;
  HandshakePeer& operator=(const HandshakePeer&) = delete;
};

}  // namespace awqd::transport
