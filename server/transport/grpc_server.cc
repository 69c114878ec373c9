// Builds the gRPC server, binds its addresses, and ends it in order.
#include "server/transport/grpc_server.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "grpc/grpc.h"
#include "grpcpp/security/server_credentials.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/transport/bounds.h"
#include "server/transport/grpc_log.h"
#include "server/transport/listen_address.h"
#include "server/transport/listen_socket.h"
#include "server/transport/shutdown.h"

namespace awqd::transport {
namespace {

// What holds for the whole process.
void PrepareGrpc() {
  TakeOverGrpcLog();
  // gRPC's locks are Abseil's, which distributions build with a search for deadlocks at each: a
  // global lock, and 3 % of the CPU time of short products.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // gRPC shuts itself down with the last of its objects and waits for its threads, one of which
  // polls for up to ten seconds after a client was killed in the middle of an answer. So it is kept
  // until the process ends.
  [[maybe_unused]] static const bool kept = (grpc_init(), true);
}

absl::Status CannotListen(const ListenAddress& address, const absl::Status& why) {
  return absl::Status(why.code(), absl::StrCat("address: cannot listen on \"",
                                               obs::LogText(address.text), "\": ", why.message()));
}

// With the port that was really bound.
std::string Spell(const ListenAddress& address, int port) {
  if (!address.socket_path.empty()) return address.text;
  return absl::StrCat(address.text.substr(0, address.text.rfind(':')), ":", port);
}

// gRPC's own limit is a client's to heed, so the door has one behind it. Calls that have ended
// count until gRPC says so.
int64_t CallsPerConnection(const Options& options) {
  const int64_t streams = options.max_concurrent_streams;
  return std::max(2 * streams, streams + 64);
}

// Two connections can have all that they may. A proxy, whose operator lets it have more
// connections, can have more calls on them.
int64_t CallsPerPeer(const Options& options) {
  return std::max(2 * CallsPerConnection(options), int64_t{4} * options.max_connections_per_peer);
}

DoorLimits LimitsOfDoor(const Options& options, Acceptor* acceptor) {
  return {
      .calls_per_connection = CallsPerConnection(options),
      .cut =
          [acceptor](const std::string& peer) {
            obs::LogEvent(obs::LogLevel::kWarning,
                          acceptor->Cut(peer) ? "connection cut: its client heeds no refusal"
                                              : "a client heeds no refusal",
                          {{"peer", obs::LogText(peer)}});
          },
      .still_for = [acceptor](const std::string& peer) { return acceptor->StillFor(peer); },
      .send_timeout = options.send_timeout,
      .client = options.client,
      .peer = {.per_peer = CallsPerPeer(options),
               .total = std::max(2 * CallsPerPeer(options), int64_t{4} * options.max_connections),
               .crowded = [acceptor](const std::string& peer) { acceptor->LookForCrowd(peer); }}};
}

Acceptor::Limits LimitsOfAcceptor(const Options& options) {
  return {.max_connections = options.max_connections,
          .max_connections_per_peer = options.max_connections_per_peer,
          .handshake_timeout = options.handshake_timeout,
          .few_calls = PeerCallLimits().few,
          .calls_per_peer = CallsPerPeer(options)};
}

void WarnOfExposure(const security::Options& options, const std::vector<ListenAddress>& addresses) {
  const bool local = std::all_of(addresses.begin(), addresses.end(),
                                 [](const ListenAddress& address) { return address.local(); });
  const std::string warning = security::ExposureWarning(options, local);
  if (!warning.empty()) obs::LogEvent(obs::LogLevel::kWarning, warning, {});
}

}  // namespace

GrpcServer::GrpcServer(const Options& options, std::function<bool()> run_queued,
                       std::function<grpc::Status(const absl::Status&)> to_grpc)
    : options_(options),
      door_(LimitsOfDoor(options, &acceptor_), options.recorder),
      sockets_(options.unix_socket_mode),
      acceptor_(LimitsOfAcceptor(options)) {
  PrepareGrpc();
  builder_ = std::make_unique<grpc::ServerBuilder>();
  loop_ = std::make_unique<CallLoop>(builder_.get(), &door_, options.threads, std::move(run_queued),
                                     std::move(to_grpc));
}

GrpcServer::~GrpcServer() { Shutdown(absl::InfinitePast()); }

absl::Status GrpcServer::Start() {
  SetBounds(options_, builder_.get());
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<security::Access> access,
                        security::Access::Create(options_.security));
  door_.Guard(std::move(access));
  if (options_.security.tls()) {
    AWQD_ASSIGN_OR_RETURN(tls_, TlsCredentials::Create(options_.security));
  }
  AWQD_RETURN_IF_ERROR(Bind());
  server_ = builder_->BuildAndStart();
  if (server_ == nullptr) return absl::UnavailableError("address: gRPC cannot start");
  AWQD_RETURN_IF_ERROR(acceptor_.Start());
  loop_->Start();
  return absl::OkStatus();
}

absl::Status GrpcServer::Bind() {
  std::vector<ListenAddress> asked;
  for (const std::string& text : options_.addresses) {
    absl::StatusOr<ListenAddress> address = ParseListenAddress(text);
    if (!address.ok()) {
      return absl::Status(address.status().code(),
                          absl::StrCat("address: ", address.status().message()));
    }
    AWQD_RETURN_IF_ERROR(Listen(*address));
    asked.push_back(*std::move(address));
  }
  WarnOfExposure(options_.security, asked);
  return absl::OkStatus();
}

absl::Status GrpcServer::Listen(const ListenAddress& address) {
  const bool tcp = address.socket_path.empty();
  if (!tcp) AWQD_RETURN_IF_ERROR(sockets_.Claim(address.socket_path));
  absl::StatusOr<ListenSockets> listening =
      tcp ? ListenOnPort(address.text, options_.keepalive_timeout)
          : ListenOnPath(address.socket_path);
  if (!listening.ok()) return CannotListen(address, listening.status());
  if (!tcp) AWQD_RETURN_IF_ERROR(sockets_.Bound());
  // The acceptor calls it as long as gRPC takes connections.
  using Builder = grpc::ServerBuilder::experimental_type;
  const std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> grpc_acceptor =
      builder_->experimental().AddExternalConnectionAcceptor(
          Builder::ExternalConnectionType::FROM_FD,
          // Who may open a socket file is for the file system to say, and nobody is on the way.
          tcp && tls_ != nullptr ? tls_->get() : grpc::InsecureServerCredentials());
  for (Descriptor& socket : listening->sockets) {
    // noexcept: without memory, gRPC would throw and keep its locks, and never accept again. The
    // process then ends.
    acceptor_.Add(std::move(socket), [grpc_acceptor](int listener, int fd) noexcept {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.listener_fd = listener;
      connection.fd = fd;
      grpc_acceptor->HandleNewConnection(&connection);
    });
  }
  if (port_ == 0) port_ = listening->port;
  addresses_.push_back(Spell(address, listening->port));
  return absl::OkStatus();
}

void GrpcServer::Shutdown(absl::Time deadline) {
  if (server_ == nullptr) return;
  sockets_.Remove();
  ShutDown(server_.get(), door_.gate(), &acceptor_, deadline);
  loop_->Stop();
  server_ = nullptr;
}

}  // namespace awqd::transport
