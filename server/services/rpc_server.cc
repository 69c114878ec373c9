// Puts the services together and onto the gRPC server.
#include "server/services/rpc_server.h"

#include <algorithm>
#include <functional>
#include <string>
#include <thread>

#include "google/protobuf/stubs/common.h"
#include "kernels/base/status.h"
#include "kernels/base/usable_threads.h"
#include "server/obs/logging.h"
#include "server/services/env.h"
#include "server/services/loads.h"
#include "server/services/oip/service.h"
#include "server/wire/status.h"

namespace awqd::services {
namespace {

#if GOOGLE_PROTOBUF_VERSION < 4022000  // later ones have no such handler
// The parser logs every message with a string that is not UTF-8. That is the client's mistake, and
// its answer says so. A fatal error ends the process.
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

// The services that have a health; "" is the whole server.
constexpr std::initializer_list<absl::string_view> kServices = {
    "", "awqd.v1.QuantizedInference", "awqd.v1.ModelRepository", "awqd.v1.ServerInfo",
    "inference.GRPCInferenceService"};

}  // namespace

RpcServer::RpcServer(const Options& options, engine::Engine* engine, repository::ModelStore* models)
    : in_flight_(options.in_flight_bytes),
      loads_("loads", options.load_threads, options.max_queued_loads),
      packings_("inline weights", options.packing_threads, options.max_queued_loads),
      on_demand_([this](const std::string& model) { return LoadModelOnDemand(env_, model); },
                 [this](std::function<void()> job) { return loads_.Run(std::move(job)); }),
      health_(kServices),
      grpc_(TransportOptions(options, *engine), RunQueued(engine), wire::ToGrpc) {
  env_.admission = grpc_.admission();
  env_.gate = env_.admission->drain();
  env_.loop = grpc_.loop();
  env_.engine = engine;
  env_.models = models;
  env_.loads = &loads_;
  env_.on_demand = &on_demand_;
  env_.lists = &lists_;
  env_.pages = &pages_;
  env_.parsings = &parsings_;
  env_.packings = &packings_;
  env_.in_flight = &in_flight_;
  env_.options = options;
  for (const Device* device : engine->devices()) {
    health_.SetWorking(DeviceService(device->info().id), true);
  }
}

void RpcServer::SetAbleToServe(bool able) {
  env_.able = able;
  for (absl::string_view service : kServices) health_.SetWorking(std::string(service), able);
}

absl::Status RpcServer::Listen() {
  AWQD_ASSIGN_OR_RETURN(shared_memory_, SharedMemory::Create(env_.options.shared_memory));
  env_.shared_memory = shared_memory_.get();
#if GOOGLE_PROTOBUF_VERSION < 4022000
  google::protobuf::SetLogHandler(QuietProtobuf);
#endif
  ServeInference(env_, grpc_.loop());
  ServeModelRepository(env_, grpc_.loop());
  ServeServerInfo(env_, grpc_.loop());
  oip::Serve(env_, grpc_.loop());
  health_.ServeOn(grpc_.loop());
  if (env_.options.channelz) {
    obs::LogEvent(obs::LogLevel::kWarning,
                  "channelz has no effect: the server has no grpc.channelz.v1 any more", {});
  }
  if (env_.options.orca) {
    utilization_.emplace([this] { return CollectSnapshot(env_, Plans::kLeftOut); },
                         UsableThreads());
    orca_.emplace(grpc_.admission(), &in_flight_, &*utilization_);
    orca_->ServeOn(grpc_.loop());
  }
  if (env_.options.reflection) {
    reflection_.emplace(grpc_.admission(), &in_flight_, env_.options.reflection_idle);
    reflection_->ServeOn(grpc_.loop());
  }
  return grpc_.Start();
}

obs::Snapshot RpcServer::Snapshot(Plans plans) const {
  obs::Snapshot out = CollectSnapshot(env_, plans);
  out.serving = env_.serving;
  return out;
}

void RpcServer::Shutdown(absl::Duration grace) {
  env_.serving = false;
  health_.Stop();
  grpc_.Shutdown(absl::Now() + grace);
  parsings_.Stop();
  packings_.Stop();
  loads_.Stop();
  lists_.Stop();
  pages_.Stop();
  if (shared_memory_ != nullptr) shared_memory_->Stop();
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const Options& options,
                                                            engine::Engine* engine,
                                                            repository::ModelStore* models) {
  std::unique_ptr<RpcServer> server(new RpcServer(options, engine, models));
  AWQD_RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace awqd::services
