// Builds the gRPC server, binds its addresses, and ends it in order.
#include "server/transport/grpc_server.h"

#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "grpc/grpc.h"
#include "grpc/support/log.h"
#include "grpcpp/security/server_credentials.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/transport/bounds.h"
#include "server/transport/listen_address.h"
#include "server/transport/shutdown.h"

namespace awqd::transport {
namespace {

// gRPC's own messages, which name its source files, are for debugging it.
void QuietGrpc(gpr_log_func_args* args) {
  obs::LogEvent(obs::LogLevel::kDebug, "grpc", {{"message", obs::LogText(args->message, 1024)}});
}

// What holds for the whole process.
void PrepareGrpc() {
  gpr_set_log_function(QuietGrpc);
  // gRPC's locks are Abseil's, which distributions build with a search for deadlocks at each: a
  // global lock, and 3 % of the CPU time of short products.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // gRPC shuts itself down with the last of its objects and waits for its threads, one of which
  // polls for up to ten seconds after a client was killed in the middle of an answer. So it is kept
  // until the process ends.
  [[maybe_unused]] static const bool kept = (grpc_init(), true);
}

absl::Status CannotListen(const ListenAddress& address) {
  return absl::UnavailableError(
      absl::StrCat("address: cannot listen on \"", obs::LogText(address.text), "\": ",
                   address.socket_path.empty()
                       ? "the port is in use, or the address is not one of this machine"
                       : "the file system does not take sockets, or somebody was faster"));
}

// With the port that was really bound.
std::string Spell(const ListenAddress& address, int port) {
  if (!address.socket_path.empty()) return address.text;
  return absl::StrCat(address.text.substr(0, address.text.rfind(':')), ":", port);
}

}  // namespace

GrpcServer::GrpcServer(const Options& options, std::function<bool()> run_queued,
                       std::function<grpc::Status(const absl::Status&)> to_grpc)
    : options_(options), door_(options.recorder), sockets_(options.unix_socket_mode) {
  PrepareGrpc();
  builder_ = std::make_unique<grpc::ServerBuilder>();
  loop_ = std::make_unique<CallLoop>(builder_.get(), &door_, options.threads, std::move(run_queued),
                                     std::move(to_grpc));
}

GrpcServer::~GrpcServer() { Shutdown(absl::InfinitePast()); }

absl::Status GrpcServer::Start() {
  SetBounds(options_, builder_.get());
  AWQD_RETURN_IF_ERROR(Bind());
  loop_->Start();
  return absl::OkStatus();
}

absl::Status GrpcServer::Bind() {
  std::vector<ListenAddress> asked;
  std::vector<std::string> bind;  // what gRPC is told
  for (const std::string& text : options_.addresses) {
    absl::StatusOr<ListenAddress> address = ParseListenAddress(text);
    if (!address.ok()) {
      return absl::Status(address.status().code(),
                          absl::StrCat("address: ", address.status().message()));
    }
    bind.push_back(address->text);
    if (!address->socket_path.empty()) {
      AWQD_ASSIGN_OR_RETURN(const std::string path, sockets_.Claim(address->socket_path));
      bind.back() = absl::StrCat("unix:", path);
    }
    asked.push_back(*std::move(address));
  }
  std::vector<int> ports(asked.size(), 0);
  for (size_t i = 0; i < asked.size(); ++i) {
    builder_->AddListeningPort(bind[i], grpc::InsecureServerCredentials(), &ports[i]);
  }
  server_ = builder_->BuildAndStart();
  for (size_t i = 0; i < asked.size(); ++i) {
    if (ports[i] == 0) return CannotListen(asked[i]);
    if (asked[i].socket_path.empty() && port_ == 0) port_ = ports[i];
    addresses_.push_back(Spell(asked[i], ports[i]));
  }
  return sockets_.Bound();
}

void GrpcServer::Shutdown(absl::Time deadline) {
  if (server_ == nullptr) return;
  sockets_.Remove();
  ShutDown(server_.get(), door_.gate(), deadline);
  loop_->Stop();
  server_ = nullptr;
}

}  // namespace awqd::transport
