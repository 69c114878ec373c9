// GrpcServer: listens, runs the call loop, and stops. Services register their methods with its
// loop.
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
#include "server/transport/admission.h"
#include "server/transport/call_loop.h"
#include "server/transport/listening.h"
#include "server/transport/options.h"
#include "server/transport/tls_credentials.h"

namespace awqd::transport {

// Limits and timers of the gRPC server: message sizes, compression, memory quota, streams of a
// connection, keepalive and age of connections. Apart from GrpcServer, so that a bench can build a
// server without services of ours that costs exactly as much.
//
// Attacker: a client that takes the memory or the connections of the process. Shown by
// tests/server/services/limits_test and tests/e2e/transport/limits_test.
void ApplyOptions(const Options& options, grpc::ServerBuilder* builder);

// Not thread-safe. The registered handlers outlive it.
class GrpcServer {
 public:
  // `run_queued` and `to_grpc` as CallLoop says.
  GrpcServer(const Options& options, std::function<bool()> run_queued,
             std::function<grpc::Status(const absl::Status&)> to_grpc);
  // Shuts down at once, unless Shutdown was called.
  ~GrpcServer();
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // Methods go here, before Start.
  CallLoop* loop() { return loop_.get(); }
  Admission* admission() { return &admission_; }

  // Listens. INVALID_ARGUMENT or UNAVAILABLE when an address cannot be listened on, or a file of
  // certificates or tokens cannot be used. Called once.
  absl::Status Start();

  // The bound port, also for port 0, of the first TCP address; 0 when there is none.
  int port() const { return port_; }
  // "127.0.0.1:43211", "unix:/run/awqd.sock": in the order of the options.
  const std::vector<std::string>& addresses() const { return addresses_; }
  // Sets the refused connections and the expiry of the certificate. Thread-safe after Start.
  void AddStatistics(obs::Snapshot* out) const;
  // Whether a peer, as gRPC spells it, is connected, as far as its name tells.
  bool IsConnected(const std::string& peer) { return acceptor_.open()->IsConnected(peer); }

  // Returns when no call is in flight and every connection is closed. Does nothing when it does not
  // listen. With a `deadline` that has passed, everything is cancelled at once.
  //
  // - Calls in flight go on until `deadline`, then they are cancelled.
  // - A call that ends meanwhile gets its status once its client has had time to read its messages
  //   (Admission::StatusDelay).
  // - New calls are answered UNAVAILABLE, on connections that have been told to go away.
  // - Once no call is in flight, clients have kRoundTrip to close. Then the server closes their
  //   connections. gRPC alone would wait 20 s for an idle client that does not read its connection
  //   (a synchronous one between two calls), and for one that has not sent its settings.
  void Shutdown(absl::Time deadline);

 private:
  absl::Status Bind();
  absl::Status Listen(const ListenAddress& address);

  const Options options_;
  std::unique_ptr<TlsCredentials> tls_;  // null: plaintext
  Admission admission_;
  int port_ = 0;
  std::vector<std::string> addresses_;
  std::unique_ptr<grpc::ServerBuilder> builder_;
  std::unique_ptr<CallLoop> loop_;
  std::unique_ptr<grpc::Server> server_;
  Acceptor acceptor_;
  std::vector<std::shared_ptr<void>> socket_files_;  // ListenSockets::file of each address
};

}  // namespace awqd::transport
