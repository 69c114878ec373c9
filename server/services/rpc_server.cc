// Puts the services together and onto the gRPC server.
#include "server/services/rpc_server.h"

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "google/protobuf/stubs/common.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/services/env.h"
#include "server/services/health.h"
#include "server/services/inference.h"
#include "server/services/model_repository.h"
#include "server/services/server_info.h"
#include "server/transport/grpc_server.h"
#include "server/wire/status.h"

namespace awqd::services {
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

#if GOOGLE_PROTOBUF_VERSION < 4022000  // later ones have no such handler
// The parser complains of every message whose strings are not UTF-8, which is the client's mistake
// and in its answer. What is fatal ends the process.
void QuietProtobuf(google::protobuf::LogLevel level, const char*, int, const std::string& message) {
  const bool fatal = level == google::protobuf::LOGLEVEL_FATAL;
  obs::LogEvent(fatal ? obs::LogLevel::kError : obs::LogLevel::kDebug, "protobuf",
                {{"message", obs::LogText(message, 1024)}});
}
#endif

// Where the processor computes, one thread for every four cores, because kernels use them all;
// beside a GPU as many as gRPC's own default.
int Threads(int wanted, const engine::Engine& engine) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (wanted > 0) return wanted;
  return engine.device().host_addressable() ? std::clamp(cores / 4, 1, 16)
                                            : std::clamp(cores / 2, 2, 16);
}

std::function<bool()> RunQueued(engine::Engine* engine) {
  if (!engine->callers_run()) return nullptr;
  return [engine] { return engine->RunQueued(); };
}

transport::Options TransportOptions(const Options& options, const engine::Engine& engine) {
  transport::Options out = options.transport;
  out.threads = Threads(options.rpc_threads, engine);
  return out;
}

class RpcServerImpl final : public RpcServer {
 public:
  RpcServerImpl(const Options& options, engine::Engine* engine, model::ModelStore* models)
      : in_flight_(options.in_flight_bytes),
        loads_("loads", options.load_threads, options.max_queued_loads),
        packings_("inline weights", options.packing_threads, options.max_queued_loads),
        health_({"", v1::QuantizedInference::service_full_name(),
                 v1::ModelRepository::service_full_name(), v1::ServerInfo::service_full_name()}),
        inference_(env_),
        repository_(env_),
        info_(env_),
        grpc_(TransportOptions(options, *engine), RunQueued(engine), wire::ToGrpc) {
    env_.gate = grpc_.gate();
    env_.engine = engine;
    env_.models = models;
    env_.loads = &loads_;
    env_.packings = &packings_;
    env_.in_flight = &in_flight_;
    env_.options = options;
  }

  ~RpcServerImpl() override { Shutdown(absl::ZeroDuration()); }

  absl::Status Listen() {
    AWQD_ASSIGN_OR_RETURN(shared_memory_, SharedMemory::Create(env_.options.shared_memory));
    env_.shared_memory = shared_memory_.get();
#if GOOGLE_PROTOBUF_VERSION < 4022000
    google::protobuf::SetLogHandler(QuietProtobuf);
#endif
    Add(&inference_);
    Add(&repository_);
    Add(&info_);
    Add(&health_);
    if (env_.options.reflection) {
      // Named, because a linker that drops unused libraries would leave the plugin out in silence.
      grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    } else {
      grpc_.builder()->SetOption(std::make_unique<WithoutReflection>());
    }
    return grpc_.Start();
  }

  int port() const override { return grpc_.port(); }
  const std::vector<std::string>& addresses() const override { return grpc_.addresses(); }
  void SetServing(bool serving) override { health_.SetServing(serving); }
  void SetStarting(bool starting) override { env_.starting.store(starting); }
  int64_t pending_loads() const override { return loads_.pending(); }
  int64_t in_flight_bytes() const override { return in_flight_.in_flight(); }
  int64_t open_shared_ranges() const override { return shared_memory_->open_ranges(); }

  void Shutdown(absl::Duration grace) override {
    health_.Stop();
    grpc_.Shutdown(absl::Now() + grace);
    packings_.Stop();
    loads_.Stop();
    if (shared_memory_ != nullptr) shared_memory_->Stop();
  }

 private:
  template <typename Service>
  void Add(Service* service) {
    grpc_.builder()->RegisterService(service);
    service->ServeOn(grpc_.loop());
  }

  transport::ByteBudget in_flight_;
  Worker loads_;
  Worker packings_;
  std::unique_ptr<SharedMemory> shared_memory_;
  Env env_;
  HealthService health_;
  InferenceService inference_;
  ModelRepositoryService repository_;
  ServerInfoService info_;
  transport::GrpcServer grpc_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const Options& options,
                                                            engine::Engine* engine,
                                                            model::ModelStore* models) {
  auto server = std::make_unique<RpcServerImpl>(options, engine, models);
  AWQD_RETURN_IF_ERROR(server->Listen());
  return std::unique_ptr<RpcServer>(std::move(server));
}

}  // namespace awqd::services
