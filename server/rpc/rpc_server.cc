// Builds the gRPC server: services, bounds, and what is switched off.
#include "server/rpc/rpc_server.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "grpc/support/log.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/rpc/bounds.h"
#include "server/rpc/health.h"
#include "server/rpc/inference_service.h"
#include "server/rpc/model_repository.h"
#include "server/rpc/server_info.h"

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

class RpcServerImpl final : public RpcServer {
 public:
  RpcServerImpl(const RpcOptions& options, Engine* engine, ModelStore* models)
      : loads_("loads", options.load_threads, options.max_queued_loads),
        packings_("inline weights", options.packing_threads, options.max_queued_loads),
        health_({"", v1::QuantizedInference::service_full_name(),
                 v1::ModelRepository::service_full_name(), v1::ServerInfo::service_full_name()}),
        inference_(env_),
        repository_(env_),
        info_(env_) {
    env_.engine = engine;
    env_.models = models;
    env_.loads = &loads_;
    env_.packings = &packings_;
    env_.limits = options.limits;
  }

  ~RpcServerImpl() override {
    if (server_ != nullptr) Shutdown(absl::ZeroDuration());
  }

  absl::Status Listen(const RpcOptions& options) {
    gpr_set_log_function(QuietGrpc);
    grpc::ServerBuilder builder;
    builder.RegisterService(&inference_);
    builder.RegisterService(&repository_);
    builder.RegisterService(&info_);
    builder.RegisterService(&health_);
    SetBounds(options, &builder);
    if (options.reflection) {
      // Named, because a linker that drops unused libraries would leave the plugin out in silence.
      grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    } else {
      builder.SetOption(std::make_unique<WithoutReflection>());
    }
    builder.AddListeningPort(options.address, grpc::InsecureServerCredentials(), &port_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port_ == 0) {
      return absl::UnavailableError(
          absl::StrCat("address: cannot listen on \"", options.address,
                       "\": the port is in use, or the address is not one of this machine"));
    }
    const size_t colon = options.address.rfind(':');
    address_ = absl::StrCat(options.address.substr(0, colon), ":", port_);
    return absl::OkStatus();
  }

  int port() const override { return port_; }
  std::string address() const override { return address_; }
  void SetServing(bool serving) override { health_.SetServing(serving); }
  void SetStarting(bool starting) override { env_.starting.store(starting); }
  int64_t pending_loads() const override { return loads_.pending(); }

  void Shutdown(absl::Duration grace) override {
    health_.Stop();
    server_->Shutdown(absl::ToChronoTime(absl::Now() + grace));
    server_->Wait();
    packings_.Stop();
    loads_.Stop();
    server_ = nullptr;
  }

 private:
  Worker loads_;
  Worker packings_;
  RpcEnv env_;
  HealthService health_;
  InferenceService inference_;
  ModelRepositoryService repository_;
  ServerInfoService info_;
  int port_ = 0;
  std::string address_;
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
