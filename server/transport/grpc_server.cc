// Configures the gRPC server, binds its addresses, and shuts it down in steps.
#include "server/transport/grpc_server.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstddef>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "grpc/compression.h"
#include "grpc/grpc.h"
#include "grpcpp/resource_quota.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/transport/grpc_log.h"

namespace awqd::transport {
namespace {

// Prepares gRPC once for the whole process.
void PrepareGrpc() {
  // gRPC's locks are Abseil's, which distributions build with a search for deadlocks at each: a
  // global lock, and 3 % of the CPU time of short products.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // gRPC shuts itself down with the last of its objects and waits for its threads, one of which
  // polls for up to ten seconds after a client was killed in the middle of an answer. So it is kept
  // until the process ends.
  [[maybe_unused]] static const bool kept = (grpc_init(), PrepareGrpcLog(), true);
}

// The address with the port that is bound.
std::string PrintAddress(const ListenAddress& address, int port) {
  if (!address.socket_path.empty()) return address.text;
  return absl::StrCat(address.text.substr(0, address.text.rfind(':')), ":", port);
}

// gRPC leaves it to the client to heed its limit, so admission has one behind it. Calls that have
// ended count until gRPC says so.
int64_t CallsPerConnection(const Options& options) {
  const int64_t streams = options.max_concurrent_streams;
  return std::max(2 * streams, streams + 64);
}

// Two connections can have all that they may. A proxy, whose operator lets it have more
// connections, can have more calls on them.
int64_t CallsPerPeer(const Options& options) {
  return std::max(2 * CallsPerConnection(options), int64_t{4} * options.max_connections_per_peer);
}

AdmissionLimits LimitsOfAdmission(const Options& options, Acceptor* acceptor) {
  return {
      .calls_per_connection = CallsPerConnection(options),
      .reset =
          [acceptor](const std::string& peer) {
            obs::LogEvent(obs::LogLevel::kWarning,
                          acceptor->open()->ResetPeer(peer)
                              ? "connection cut: its client heeds no refusal"
                              : "a client heeds no refusal",
                          {{"peer", obs::LogText(peer)}});
          },
      .idle_time = [acceptor](const std::string& peer) { return acceptor->open()->IdleTime(peer); },
      .write_timeout = options.send_timeout,
      .client = options.client,
      .peer = {.per_peer = CallsPerPeer(options),
               .total = std::max(2 * CallsPerPeer(options), int64_t{4} * options.max_connections),
               .crowded = [acceptor](const std::string& peer) { acceptor->CheckForCrowd(peer); }}};
}

Acceptor::Limits LimitsOfAcceptor(const Options& options) {
  return {.max_connections = options.max_connections,
          .max_connections_per_peer = options.max_connections_per_peer,
          .handshake_timeout = options.handshake_timeout,
          .few_calls = PeerCallLimits().few,
          .calls_per_peer = CallsPerPeer(options)};
}

// For arguments of gRPC.
int Millis(absl::Duration duration) {
  return static_cast<int>(std::min<int64_t>(absl::ToInt64Milliseconds(duration), int64_t{INT_MAX}));
}

// The server waits until no call has come or ended for kQuiet, and kQuietMost at most: callers that
// do not wait for answers never cease.
constexpr absl::Duration kQuiet = absl::Milliseconds(50);
constexpr absl::Duration kQuietMost = absl::Milliseconds(500);
// Within this time gRPC has written to every connection that the server goes away. It does so in
// its Shutdown, which does not say when.
constexpr absl::Duration kAnnounce = absl::Milliseconds(20);
constexpr absl::Duration kPoll = absl::Milliseconds(2);

// Returns when no call has come or ended for kQuiet. A caller that sends one call after the other
// waits for its answer by then, and sends nothing.
void AwaitQuietCallers(const Drain& drain, absl::Time deadline) {
  // Calls that came and calls that run.
  const auto read_counts = [&] {
    const int64_t came = drain.rejected();
    return std::make_pair(came, drain.in_flight() - came);
  };
  const absl::Time most = std::min(absl::Now() + kQuietMost, deadline);
  absl::Time moved = absl::Now();
  for (auto last = read_counts(); absl::Now() < std::min(moved + kQuiet, most);) {
    absl::SleepFor(kPoll);
    if (const auto seen = read_counts(); seen != last) {
      last = seen;
      moved = absl::Now();
    }
  }
}

// Not joinable when the process is out of threads.
std::thread TryThread(std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error&) {
    return std::thread();
  }
}

}  // namespace

void ApplyOptions(const Options& options, grpc::ServerBuilder* builder) {
  // Services refuse what is over the receive limit themselves, in words that say which limit it is.
  // It makes no difference to memory: gRPC too looks at a message only when all of it is here.
  builder->SetMaxReceiveMessageSize(INT_MAX);
  builder->SetMaxSendMessageSize(static_cast<int>(options.max_send_message_bytes));
  // The receive bound is checked after a message was inflated, so compressed ones are refused.
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder->SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  grpc::ResourceQuota quota("awqd");
  quota.Resize(static_cast<size_t>(options.memory_quota_bytes));
  builder->SetResourceQuota(quota);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, options.max_metadata_bytes);
  // For TLS, and for settings within it: the acceptor waits for those in plaintext.
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                              Millis(options.handshake_timeout));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Millis(options.keepalive_time));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Millis(options.keepalive_timeout));
  // gRPC 1.83 never starts the timer of the argument above, and closes after this one, 60 s unless
  // it is set. gRPC 1.51 does not know it.
  builder->AddChannelArgument("grpc.http2.ping_timeout_ms", Millis(options.keepalive_timeout));
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              Millis(options.min_ping_interval));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, Millis(options.max_connection_idle));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, Millis(options.max_connection_age));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                              Millis(options.max_connection_age_grace));
}

GrpcServer::GrpcServer(const Options& options, std::function<bool()> run_queued,
                       std::function<grpc::Status(const absl::Status&)> to_grpc)
    : options_(options),
      admission_(LimitsOfAdmission(options, &acceptor_), options.recorder),
      acceptor_(LimitsOfAcceptor(options)) {
  PrepareGrpc();
  builder_ = std::make_unique<grpc::ServerBuilder>();
  loop_ = std::make_unique<CallLoop>(builder_.get(), &admission_, options.threads,
                                     std::move(run_queued), std::move(to_grpc), options.gathers);
}

GrpcServer::~GrpcServer() { Shutdown(absl::InfinitePast()); }

absl::Status GrpcServer::Start() {
  ApplyOptions(options_, builder_.get());
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<security::Access> access,
                        security::Access::Create(options_.security));
  admission_.SetAccess(std::move(access));
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
  bool local = true;
  for (const std::string& text : options_.addresses) {
    absl::StatusOr<ListenAddress> address = ParseListenAddress(text);
    if (!address.ok()) return Prefixed("address", address.status());
    AWQD_RETURN_IF_ERROR(Listen(*address));
    local = local && address->local();
  }
  const std::string warning = security::ExposureWarning(options_.security, local);
  if (!warning.empty()) obs::LogEvent(obs::LogLevel::kWarning, warning, {});
  return absl::OkStatus();
}

absl::Status GrpcServer::Listen(const ListenAddress& address) {
  absl::StatusOr<ListenSockets> listening =
      ListenOn(address, options_.unix_socket_mode, options_.keepalive_timeout);
  if (!listening.ok()) return Prefixed("address", listening.status());
  // The file system says who may open a socket file, and nobody is on the way.
  const bool tls = address.socket_path.empty() && tls_ != nullptr;
  socket_files_.push_back(std::move(listening->file));
  // The acceptor calls it as long as gRPC takes connections.
  using Builder = grpc::ServerBuilder::experimental_type;
  const std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> grpc_acceptor =
      builder_->experimental().AddExternalConnectionAcceptor(
          Builder::ExternalConnectionType::FROM_FD,
          tls ? tls_->get() : grpc::InsecureServerCredentials());
  for (UniqueFd& socket : listening->sockets) {
    // noexcept: without memory, gRPC would throw and keep its locks, and never accept again. The
    // process then ends.
    acceptor_.AddListener(std::move(socket), tls, [grpc_acceptor](int listener, int fd) noexcept {
      const HandshakePeer peer(fd);
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.listener_fd = listener;
      connection.fd = fd;
      grpc_acceptor->HandleNewConnection(&connection);
    });
  }
  if (port_ == 0) port_ = listening->port;
  addresses_.push_back(PrintAddress(address, listening->port));
  return absl::OkStatus();
}

void GrpcServer::AddStatistics(obs::Snapshot* out) const {
  const Acceptor::Counts& counts = acceptor_.counts();
  out->refused_connections = {{"max_connections", counts.too_many},
                              {"max_connections_per_peer", counts.too_many_of_origin},
                              {"no_descriptor", counts.no_descriptor},
                              {"silent", counts.silent},
                              {"crowded", counts.crowded + counts.penalized},
                              {"plaintext", counts.plaintext},
                              {"tls", counts.tls},
                              {"tls_handshake", FailedHandshakes()}};
  if (tls_ != nullptr) out->certificate_expiry = tls_->expiry();
}

void GrpcServer::Shutdown(absl::Time deadline) {
  if (server_ == nullptr) return;
  Drain& drain = *admission_.drain();
  socket_files_.clear();
  drain.HoldNewCalls();
  AwaitQuietCallers(drain, deadline);
  acceptor_.Stop();
  std::atomic<bool> ended{false};
  // Without this thread clients are not told to go away, but calls end as ever.
  std::thread shutdown = TryThread([&] {
    server_->Shutdown(absl::ToChronoTime(deadline));
    ended = true;
  });
  const absl::Time announced = absl::Now() + kAnnounce;
  while (!ended && absl::Now() < std::min(announced, deadline)) absl::SleepFor(kPoll);
  drain.RejectNewCalls();
  // Clients have this long to answer and to close by themselves.
  const absl::Time goodbye = absl::Now() + kRoundTrip;
  const auto idle = [&] {
    return drain.in_flight() == 0 && absl::Now() > goodbye && acceptor_.open()->AllSent();
  };
  while (!ended && absl::Now() < deadline && !idle()) absl::SleepFor(kPoll);
  if (shutdown.joinable()) {
    // Harmless when it has ended; past the deadline gRPC does the same by itself.
    grpc_server_cancel_all_calls(server_->c_server());
    acceptor_.open()->EndAll();
    shutdown.join();
  } else {
    acceptor_.open()->EndAll();
    server_->Shutdown(absl::ToChronoTime(absl::Now()));
  }
  server_->Wait();
  loop_->Stop();
  server_ = nullptr;
}

}  // namespace awqd::transport
