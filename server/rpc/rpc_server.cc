// Builds the gRPC server: services, bounds, and what is switched off.
#include "server/rpc/rpc_server.h"

#include <algorithm>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "google/protobuf/stubs/common.h"
#include "grpc/grpc.h"
#include "grpc/support/log.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/rpc/bounds.h"
#include "server/rpc/call_loop.h"
#include "server/rpc/health.h"
#include "server/rpc/inference_service.h"
#include "server/rpc/listen_address.h"
#include "server/rpc/model_repository.h"
#include "server/rpc/server_info.h"
#include "server/rpc/shutdown.h"
#include "server/rpc/status_grpc.h"
#include "server/rpc/unix_socket.h"

namespace awqd {
namespace {

// Linking the reflection library switches reflection on for every server of the process, so off
// means taking its plugin out again.
class WithoutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                  [](const auto& plugin) {
                                    return plugin->name() == "proto_server_reflection";
                                  }),
                   plugins->end());
  }
};

// gRPC's own messages, which name its source files, are for debugging it.
void QuietGrpc(gpr_log_func_args* args) {
  LogEvent(LogLevel::kDebug, "grpc", {{"message", LogText(args->message, 1024)}});
}

#if GOOGLE_PROTOBUF_VERSION < 4022000  // later ones have no such handler
// The parser complains of every message whose strings are not UTF-8, which is the client's mistake
// and in its answer. What is fatal ends the process.
void QuietProtobuf(google::protobuf::LogLevel level, const char*, int, const std::string& message) {
  const bool fatal = level == google::protobuf::LOGLEVEL_FATAL;
  LogEvent(fatal ? LogLevel::kError : LogLevel::kDebug, "protobuf",
           {{"message", LogText(message, 1024)}});
}
#endif

// What holds for the whole process.
void PrepareGrpc() {
  gpr_set_log_function(QuietGrpc);
#if GOOGLE_PROTOBUF_VERSION < 4022000
  google::protobuf::SetLogHandler(QuietProtobuf);
#endif
  // gRPC's locks are Abseil's, which distributions build with a search for deadlocks at each: a
  // global lock, and 3 % of the CPU time of short products.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // gRPC shuts itself down with the last of its objects and waits for its threads, one of which
  // polls for up to ten seconds after a client was killed in the middle of an answer. So it is kept
  // until the process ends.
  [[maybe_unused]] static const bool kept = (grpc_init(), true);
}

class RpcServerImpl final : public RpcServer {
 public:
  RpcServerImpl(const RpcOptions& options, Engine* engine, ModelStore* models)
      : in_flight_(options.limits.in_flight_bytes),
        loads_("loads", options.load_threads, options.max_queued_loads),
        packings_("inline weights", options.packing_threads, options.max_queued_loads),
        health_({"", v1::QuantizedInference::service_full_name(),
                 v1::ModelRepository::service_full_name(), v1::ServerInfo::service_full_name()}),
        inference_(env_),
        repository_(env_),
        info_(env_),
        sockets_(options.unix_socket_mode) {
    env_.gate = &gate_;
    env_.engine = engine;
    env_.models = models;
    env_.loads = &loads_;
    env_.packings = &packings_;
    env_.in_flight = &in_flight_;
    env_.limits = options.limits;
  }

  ~RpcServerImpl() override {
    if (server_ != nullptr) Shutdown(absl::ZeroDuration());
  }

  absl::Status Listen(const RpcOptions& options) {
    AWQD_ASSIGN_OR_RETURN(shared_memory_, SharedMemory::Create(options.shared_memory));
    env_.shared_memory = shared_memory_.get();
    PrepareGrpc();
    grpc::ServerBuilder builder;
    builder.RegisterService(&inference_);
    builder.RegisterService(&repository_);
    builder.RegisterService(&info_);
    builder.RegisterService(&health_);
    loop_ = std::make_unique<CallLoop>(&builder, Threads(options.rpc_threads, *env_.engine),
                                       RunQueued(env_.engine));
    inference_.ServeOn(loop_.get());
    repository_.ServeOn(loop_.get());
    info_.ServeOn(loop_.get());
    health_.ServeOn(loop_.get());
    SetBounds(options, &builder);
    if (options.reflection) {
      // Named, because a linker that drops unused libraries would leave the plugin out in silence.
      grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    } else {
      builder.SetOption(std::make_unique<WithoutReflection>());
    }
    AWQD_RETURN_IF_ERROR(Bind(options, &builder));
    loop_->Start();
    return absl::OkStatus();
  }

  int port() const override { return port_; }
  const std::vector<std::string>& addresses() const override { return addresses_; }
  void SetServing(bool serving) override { health_.SetServing(serving); }
  void SetStarting(bool starting) override { env_.starting.store(starting); }
  int64_t pending_loads() const override { return loads_.pending(); }
  int64_t in_flight_bytes() const override { return in_flight_.in_flight(); }
  int64_t open_shared_ranges() const override { return shared_memory_->open_ranges(); }

  void Shutdown(absl::Duration grace) override {
    health_.Stop();
    sockets_.Remove();
    ShutDown(server_.get(), &gate_, absl::Now() + grace);
    loop_->Stop();
    packings_.Stop();
    loads_.Stop();
    shared_memory_->Stop();
    server_ = nullptr;
  }

 private:
  absl::Status Bind(const RpcOptions& options, grpc::ServerBuilder* builder) {
    std::vector<ListenAddress> asked;
    std::vector<std::string> bind;  // what gRPC is told
    for (const std::string& text : options.addresses) {
      absl::StatusOr<ListenAddress> address = ParseListenAddress(text);
      if (!address.ok()) return WithField(address.status(), "address");
      bind.push_back(address->text);
      if (!address->socket_path.empty()) {
        AWQD_ASSIGN_OR_RETURN(const std::string path, sockets_.Claim(address->socket_path));
        bind.back() = absl::StrCat("unix:", path);
      }
      asked.push_back(*std::move(address));
    }
    std::vector<int> ports(asked.size(), 0);
    for (size_t i = 0; i < asked.size(); ++i) {
      builder->AddListeningPort(bind[i], grpc::InsecureServerCredentials(), &ports[i]);
    }
    server_ = builder->BuildAndStart();
    for (size_t i = 0; i < asked.size(); ++i) {
      if (ports[i] == 0) return CannotListen(asked[i]);
      if (asked[i].socket_path.empty() && port_ == 0) port_ = ports[i];
      addresses_.push_back(Spell(asked[i], ports[i]));
    }
    return sockets_.Bound();
  }

  static absl::Status CannotListen(const ListenAddress& address) {
    return absl::UnavailableError(
        absl::StrCat("address: cannot listen on \"", LogText(address.text), "\": ",
                     address.socket_path.empty()
                         ? "the port is in use, or the address is not one of this machine"
                         : "the file system does not take sockets, or somebody was faster"));
  }

  // Where the processor computes, one thread for every four cores, because kernels use them all;
  // beside a GPU as many as gRPC's own default.
  static int Threads(int wanted, const Engine& engine) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    if (wanted > 0) return wanted;
    return engine.device().host_addressable() ? std::clamp(cores / 4, 1, 16)
                                              : std::clamp(cores / 2, 2, 16);
  }

  static std::function<bool()> RunQueued(Engine* engine) {
    if (!engine->callers_run()) return nullptr;
    return [engine] { return engine->RunQueued(); };
  }

  // With the port that was really bound.
  static std::string Spell(const ListenAddress& address, int port) {
    if (!address.socket_path.empty()) return address.text;
    return absl::StrCat(address.text.substr(0, address.text.rfind(':')), ":", port);
  }

  ByteBudget in_flight_;
  Worker loads_;
  Worker packings_;
  std::unique_ptr<SharedMemory> shared_memory_;
  CallGate gate_;
  RpcEnv env_;
  HealthService health_;
  InferenceService inference_;
  ModelRepositoryService repository_;
  ServerInfoService info_;
  UnixSockets sockets_;
  int port_ = 0;
  std::vector<std::string> addresses_;
  std::unique_ptr<CallLoop> loop_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcOptions& options,
                                                            Engine* engine, ModelStore* models) {
  auto server = std::make_unique<RpcServerImpl>(options, engine, models);
  AWQD_RETURN_IF_ERROR(server->Listen(options));
  return std::unique_ptr<RpcServer>(std::move(server));
}

}  // namespace awqd
