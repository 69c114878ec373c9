// GrpcServer: listens, runs the call loop, and stops. What it serves is registered by others.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "server/transport/acceptor.h"
#include "server/transport/call_loop.h"
#include "server/transport/admission.h"
#include "server/transport/listen_address.h"
#include "server/transport/options.h"
#include "server/transport/tls_credentials.h"
#include "server/transport/unix_socket.h"

namespace awqd::transport {

// Not thread-safe. What is registered outlives it.
class GrpcServer {
 public:
  // `run_queued` and `to_grpc` as CallLoop says.
  GrpcServer(const Options& options, std::function<bool()> run_queued,
             std::function<grpc::Status(const absl::Status&)> to_grpc);
  // Shuts down at once, if nobody has.
  ~GrpcServer();
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // Methods go here, before Start.
  CallLoop* loop() { return loop_.get(); }
  Admission* admission() { return &admission_; }

  // Listens. INVALID_ARGUMENT or UNAVAILABLE when an address cannot be listened on, or a file of
  // certificates or tokens not be used. Called once.
  absl::Status Start();

  // The port that is really bound, also for port 0, of the first TCP address; 0 when there is none.
  int port() const { return port_; }
  // "127.0.0.1:43211", "unix:/run/awqd.sock": in the order of the options.
  const std::vector<std::string>& addresses() const { return addresses_; }

  // Who is connected, and who was not let in.
  Acceptor* acceptor() { return &acceptor_; }

  // Refuses new calls, waits for those in flight until `deadline`, cancels the rest, and returns
  // when none is left. Does nothing when it does not listen.
  void Shutdown(absl::Time deadline);

 private:
  absl::Status Bind();
  absl::Status Listen(const ListenAddress& address);

  const Options options_;
  std::unique_ptr<TlsCredentials> tls_;  // null: plaintext
  Admission admission_;
  UnixSockets sockets_;
  int port_ = 0;
  std::vector<std::string> addresses_;
  std::unique_ptr<grpc::ServerBuilder> builder_;
  std::unique_ptr<CallLoop> loop_;
  std::unique_ptr<grpc::Server> server_;
  Acceptor acceptor_;
};

}  // namespace awqd::transport
