// Puts the services together and onto the gRPC server.
#include "server/services/rpc_server.h"

#include <algorithm>
#include <functional>
#include <thread>
#include <utility>

#include "google/protobuf/stubs/common.h"
#include "kernels/base/status.h"
#include "server/obs/logging.h"
#include "server/services/rings/prepare.h"
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

std::function<bool()> RunQueued(engine::Engine* engine) {
  if (!engine->callers_run()) return nullptr;
  return [engine] { return engine->RunQueued(); };
}

transport::Options TransportOptions(const Options& options, const engine::Engine& engine) {
  transport::Options out = options.transport;
  out.threads = options.rpc_threads;
  // A GPU's lanes gather what comes together; what comes alone is not to wait.
  out.gathers = engine.device().host_addressable();
  if (out.threads > 0) return out;
  // Where the processor computes, one thread for every four cores, because kernels use them all;
  // beside a GPU as many as gRPC's own default.
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  out.threads = engine.device().host_addressable() ? std::clamp(cores / 4, 1, 16)
                                                   : std::clamp(cores / 2, 2, 16);
  return out;
}

// The services that have a health; "" is the whole server.
constexpr std::initializer_list<absl::string_view> kServices = {
    "", "awqd.v1.QuantizedInference", "awqd.v1.ModelRepository", "awqd.v1.ServerInfo",
    "inference.GRPCInferenceService"};

}  // namespace

RpcServer::RpcServer(const Options& options, engine::Engine* engine, repository::ModelStore* models)
    : health_(kServices),
      grpc_(TransportOptions(options, *engine), RunQueued(engine), wire::ToGrpc) {
  const auto queue = [](std::string what, int threads, int64_t max_queued) {
    return std::make_unique<TaskQueue>(std::move(what), threads, max_queued);
  };
  env_.options = options;
  env_.starting = options.starting;
  env_.engine = engine;
  env_.models = models;
  env_.admission = grpc_.admission();
  env_.loop = grpc_.loop();
  env_.in_flight = std::make_unique<transport::ByteBudget>(options.in_flight_bytes);
  env_.loads = queue("loads", 2, 64);
  env_.lists = queue("lists of models", 1, 64);
  env_.pages = queue("pages of models", 1, 256);  // short work, and many ask at once
  env_.parsings = queue("large requests", 1, 64);
  env_.packings = queue("inline weights", 1, 64);
  env_.on_demand = std::make_unique<repository::LoadOnDemand>(
      [this](const std::string& model) { return LoadModelOnDemand(env_, model); },
      [this](std::function<void()> job) { return env_.loads->Run(std::move(job)); });
  env_.admission->SetBusyCheck(
      [engine](absl::Time deadline) { return engine->CheckArrival(deadline); });
  for (const Device* device : engine->devices()) {
    health_.SetWorking(DeviceService(device->info().id), true);
  }
}

void RpcServer::SetAbleToServe(bool able) {
  env_.able = able;
  for (absl::string_view service : kServices) health_.SetWorking(std::string(service), able);
}

obs::Snapshot RpcServer::Snapshot(Plans plans) const {
  obs::Snapshot out = CollectSnapshot(env_, plans);
  out.serving = env_.serving;
  grpc_.AddStatistics(&out);
  if (env_.rings != nullptr) out.rings = env_.rings->statistics();
  if (env_.lender != nullptr) out.leases = env_.lender->statistics();
  if (!env_.options.sharing_devices.empty())
    out.shared_device_memory = env_.regions->SweepDevices();
  return out;
}

void RpcServer::Shutdown(absl::Duration grace) {
  env_.serving = false;
  health_.Stop();
  if (env_.lender != nullptr) env_.lender->Stop();  // borrowers need nothing more of it
  grpc_.Shutdown(absl::Now() + grace);              // waits for the calls of rings too
  if (env_.rings != nullptr) env_.rings->Stop();
  for (TaskQueue* queue : {env_.parsings.get(), env_.packings.get(), env_.loads.get(),
                           env_.lists.get(), env_.pages.get()}) {
    queue->Stop();
  }
  if (env_.shared_memory != nullptr) env_.shared_memory->Stop();
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const Options& options,
                                                            engine::Engine* engine,
                                                            repository::ModelStore* models) {
  std::unique_ptr<RpcServer> server(new RpcServer(options, engine, models));
  Env& env = server->env_;
  AWQD_ASSIGN_OR_RETURN(env.shared_memory, SharedMemory::Create(options.shared_memory));
  env.regions = std::make_unique<Regions>(
      env.shared_memory.get(), !options.sharing_devices.empty(),
      [grpc = &server->grpc_](const std::string& peer) { return grpc->IsConnected(peer); });
#if GOOGLE_PROTOBUF_VERSION < 4022000
  google::protobuf::SetLogHandler(QuietProtobuf);
#endif
  ServeInference(env);
  ServeShareMemory(env);
  ServeModelRepository(env);
  ServeServerInfo(env);
  oip::Serve(env);
  server->health_.Serve(env);
  if (options.channelz) {
    obs::LogEvent(obs::LogLevel::kWarning,
                  "channelz has no effect: the server has no grpc.channelz.v1 any more", {});
  }
  if (options.orca) orca::Serve(env);
  if (options.reflection) ServeReflection(env);
  if (!options.ring.path.empty()) env.rings = rings::MakeServer(env);
  AWQD_RETURN_IF_ERROR(server->grpc_.Start());
  if (env.rings != nullptr) {
    const transport::Options& transport = options.transport;
    AWQD_RETURN_IF_ERROR(Prefixed(
        "ring_path", env.rings->Start(transport.unix_socket_mode, transport.handshake_timeout)));
  }
  if (!options.lend_path.empty()) {
    env.lender =
        std::make_unique<lending::LendServer>(models, &env.admission->access(), &env.starting);
    const transport::Options& transport = options.transport;
    AWQD_RETURN_IF_ERROR(
        Prefixed("lend", env.lender->Start(options.lend_path, transport.unix_socket_mode,
                                           transport.handshake_timeout)));
  }
  return server;
}

}  // namespace awqd::services
