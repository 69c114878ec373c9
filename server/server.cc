// Starts, waits and stops.
#include "server/server.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "kernels/base/idle_memory.h"
#include "kernels/base/mutex.h"
#include "kernels/base/parallel_for.h"
#include "kernels/base/pause.h"
#include "kernels/base/status.h"
#include "server/engine/engine.h"
#include "server/obs/call_recorder.h"
#include "server/obs/logging.h"
#include "server/obs/metrics_server.h"
#include "server/otlp/otlp_exporter.h"
#include "server/repository/idle_models.h"
#include "server/repository/model_store.h"
#include "server/repository/reconciler.h"
#include "server/security/access.h"
#include "server/services/rpc_server.h"
#include "server/transport/drain.h"
#include "server/transport/listening.h"

namespace awqd {
namespace {

// Milliseconds after which a failed load or a device fault is noticed at the latest.
constexpr int kPollMs = 50;

absl::Status WritePort(const std::string& path, int port) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream file(path);
  file << port << "\n";
  file.close();
  if (file) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--port_file: cannot write \"", path, "\""));
}

struct OpenedDevice {
  std::unique_ptr<Device> device;
  std::string why;      // the reason for its choice
  bool healthy = true;  // at the last check
};

// Runs `make(i)` for each i below `count` at the same time, because a GPU takes up to a second.
// Returns the first error in their order.
absl::Status MakeEach(size_t count, absl::FunctionRef<absl::Status(size_t)> make) {
  std::vector<absl::Status> made(count);
  ParallelFor(count, [&](size_t i) { made[i] = make(i); });
  for (const absl::Status& status : made) AWQD_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

// Opens every device of the option, in its order. Fails with the error of the first one in that
// order that cannot be opened; INVALID_ARGUMENT when a device is listed under two spellings.
absl::StatusOr<std::vector<OpenedDevice>> OpenDevices(const Options& options,
                                                      const DeviceOpener& open_device) {
  const std::vector<std::string> specs = absl::StrSplit(options.device, ',');
  std::vector<OpenedDevice> out(specs.size());
  std::vector<DeviceOptions> device_options;
  std::map<std::string, int> times;  // how often each device was listed
  for (const std::string& spec : specs) {
    const int before = times[spec]++;
    device_options.push_back({.cpu_threads = options.cpu_threads,
                              .budget_bytes = options.device_memory_limit,
                              .batch_invariant = options.batch_invariant,
                              .id_suffix = before == 0 ? "" : absl::StrCat("#", before + 1),
                              .cpu_pin_threads = options.cpu_pin_threads,
                              .cpu_interleave = options.cpu_interleave});
  }
  AWQD_RETURN_IF_ERROR(MakeEach(specs.size(), [&](size_t i) -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(out[i].device, open_device(specs[i], device_options[i], &out[i].why));
    return absl::OkStatus();
  }));
  std::set<std::string> ids;
  for (const OpenedDevice& opened : out) {
    if (ids.insert(opened.device->info().id).second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--device: got \"", options.device,
                     "\", expected one spelling for each device, as in cuda:0,cuda:0"));
  }
  return out;
}

// The devices whose memory clients share: all of them, if kernels of each take such memory.
std::vector<Device*> SharingDevices(const std::vector<Device*>& devices) {
  for (const Device* device : devices) {
    if (!device->host_addressable()) continue;
    obs::LogEvent(obs::LogLevel::kWarning,
                  "--cuda_shared_memory has no effect: not every device is a GPU",
                  {{"device", device->info().id}});
    return {};
  }
  return devices;
}

// An engine for each device, in their order. The devices outlive the engines.
absl::StatusOr<std::vector<std::unique_ptr<engine::Engine>>> MakeEngines(
    const std::vector<Device*>& devices, const engine::EngineOptions& options) {
  std::vector<std::unique_ptr<engine::Engine>> out(devices.size());
  AWQD_RETURN_IF_ERROR(MakeEach(devices.size(), [&](size_t i) -> absl::Status {
    AWQD_ASSIGN_OR_RETURN(out[i], engine::MakeLocalEngine(devices[i], options));
    return absl::OkStatus();
  }));
  return out;
}

// Weights on the same devices that differ in nothing kernels care about share a plan: one of each
// is enough to warm up and to explain.
std::vector<std::shared_ptr<const model::PlacedWeight>> SelectOneOfEachShape(
    const model::Model& model) {
  std::map<std::string, std::shared_ptr<const model::PlacedWeight>> shapes;
  for (const auto& [path, weight] : model.weights) {
    const WeightShape& shape = weight->shape;
    shapes.emplace(absl::StrCat(ToString(shape.scheme), " [", shape.k, ", ", shape.n, "] ",
                                weight->devices(), weight->partitioned_at_rows() ? " rows" : ""),
                   weight);
  }
  std::vector<std::shared_ptr<const model::PlacedWeight>> out;
  for (auto& [shape, weight] : shapes) out.push_back(std::move(weight));
  return out;
}

// Warms kernels up on a new model's shapes, and logs which kernels will serve them.
absl::Status WarmUp(const model::Model& model, engine::Engine& engine) {
  for (const std::shared_ptr<const model::PlacedWeight>& weight : SelectOneOfEachShape(model)) {
    AWQD_RETURN_IF_ERROR(engine.WarmUp(weight));
    const WeightShape& shape = weight->shape;
    const DeviceWeight& first = *weight->parts.front().weight;
    obs::LogLimited(
        obs::LogLevel::kDebug, "plan",
        {{"model", model.name},
         {"shape", absl::StrCat("[", shape.k, ", ", shape.n, "]")},
         {"scheme", ToString(shape.scheme)},
         {"devices", weight->devices()},
         {"columns_each", first.shape.n},
         {"token_threshold", engine.TokenThreshold(first)},
         {"kernels", Explain({first.layout, first.plan}, first.shape, first.device->info())}});
  }
  return absl::OkStatus();
}

// Null without traces.
absl::StatusOr<std::unique_ptr<obs::SpanExporter>> MakeExporter(const TraceOptions& options) {
  if (!options.file.empty()) {
    auto file = obs::OpenSpanFile(options.file);
    return file.ok() ? std::move(file) : Prefixed("--trace_file", file.status());
  }
  const bool by_flag = !options.otlp_endpoint.empty();
  const std::string endpoint = by_flag ? options.otlp_endpoint : otlp::EndpointOfEnvironment();
  if (endpoint.empty()) return nullptr;
  const auto otlp = otlp::ReadOtlpOptions(endpoint, AWQD_VERSION);
  if (otlp.ok()) {
    obs::LogEvent(obs::LogLevel::kInfo, "traces", {{"collector", obs::LogText(otlp->target)}});
    return otlp::MakeOtlpExporter(*otlp);
  }
  if (by_flag) return otlp.status();
  // An orchestrator may set the variables for programs of every kind.
  obs::LogEvent(obs::LogLevel::kWarning, "no traces: the environment names no usable collector",
                {{"reason", otlp.status().message()}});
  return nullptr;
}

absl::StatusOr<std::unique_ptr<obs::Tracer>> MakeTracer(const TraceOptions& options) {
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<obs::SpanExporter> exporter, MakeExporter(options));
  if (exporter == nullptr) return nullptr;
  const double sample = options.sample > 0 ? options.sample : otlp::SampleOfEnvironment();
  return std::make_unique<obs::Tracer>(sample, std::move(exporter));
}

// The recorder of calls that the options ask for. Null when no call is logged or traced.
// INVALID_ARGUMENT when the file of traces cannot be written. Called before threads start.
absl::StatusOr<std::unique_ptr<obs::CallRecorder>> MakeCallRecorder(const Options& options) {
  AWQD_ASSIGN_OR_RETURN(std::unique_ptr<obs::Tracer> tracer, MakeTracer(options.trace));
  if (tracer == nullptr && options.access_log.mode == obs::AccessLogMode::kOff) {
    return std::unique_ptr<obs::CallRecorder>();
  }
  obs::WantRequests();
  return std::make_unique<obs::CallRecorder>(options.access_log, std::move(tracer));
}

class ServerImpl final : public Server {
 public:
  explicit ServerImpl(const Options& options) : options_(options) {}
  ~ServerImpl() override { Stop(absl::ZeroDuration()); }

  absl::Status Start(const DeviceOpener& open_device) {
    AWQD_ASSIGN_OR_RETURN(devices_, OpenDevices(options_, open_device));
    std::vector<Device*> devices;
    for (const OpenedDevice& opened : devices_) devices.push_back(opened.device.get());
    models_ = std::make_unique<repository::ModelStore>(
        repository::ModelFolders(options_.model_repository, options_.models), devices,
        options_.sharding,
        [](absl::string_view line) { obs::LogLimited(obs::LogLevel::kInfo, line, {}); },
        obs::ShowsStatusLine() ? model::ProgressLog(obs::ShowStatusLine) : nullptr);
    AWQD_ASSIGN_OR_RETURN(
        std::vector<std::string> names,
        repository::ChooseModels(options_.load_models, options_.watch.on || options_.keep_going,
                                 *models_));
    AWQD_ASSIGN_OR_RETURN(auto engines, MakeEngines(devices, options_.engine));
    engine_ = engine::MakeRoutingEngine(std::move(engines));
    models_->set_require_all_weights(options_.require_all_weights);
    models_->set_lend(!options_.rpc.lend_path.empty());
    models_->set_before_serving(
        [this](const model::Model& model) { return WarmUp(model, *engine_); });
    AWQD_ASSIGN_OR_RETURN(recorder_, MakeCallRecorder(options_));
    AWQD_RETURN_IF_ERROR(ListenForMetrics());
    services::Options rpc = options_.rpc;
    if (rpc.shared_memory.cuda) rpc.sharing_devices = SharingDevices(devices);
    rpc.transport.recorder = recorder_.get();
    rpc.start_models = {names.begin(), names.end()};
    rpc.starting = true;
    AWQD_ASSIGN_OR_RETURN(rpc_, services::RpcServer::Start(rpc, engine_.get(), models_.get()));
    SetDrain(rpc_->admission()->drain());
    for (const OpenedDevice& opened : devices_) {
      const DeviceInfo& info = opened.device->info();
      obs::LogEvent(obs::LogLevel::kInfo, "device",
                    {{"id", info.id}, {"name", info.name}, {"why", opened.why}});
    }
    AWQD_RETURN_IF_ERROR(StartMetrics());
    for (const std::string& address : rpc_->addresses()) {
      obs::LogEvent(obs::LogLevel::kInfo, absl::StrCat("listening on ", address), {});
    }
    loader_ = std::thread(
        [this, names = std::move(names)] { options_.watch.on ? Watch(names) : LoadAll(names); });
    if (options_.idle_unload < absl::InfiniteDuration()) {
      idle_ = std::thread([this] {
        repository::IdleUnloader unloader(options_.idle_unload, options_.pinned, models_.get());
        while (pause_.WaitFor(unloader.interval())) unloader.UnloadIdleModels(absl::Now());
      });
    }
    // This is the last step, because a script that reads the port may send a signal at once.
    // ThreadSanitizer blocks signals while a thread is created, and a signal that meets a thread
    // within gRPC waits there until gRPC wakes it.
    return WritePort(options_.port_file, rpc_->port());
  }

  int port() const override { return rpc_->port(); }

  absl::Status Run(int stop_fd) override {
    const absl::Status reason = WaitForReason(stop_fd);
    obs::LogEvent(reason.ok() ? obs::LogLevel::kInfo : obs::LogLevel::kError, "stopping",
                  {{"reason", reason.ok() ? "signal" : std::string(reason.message())}});
    Stop(reason.ok() ? options_.drain_delay : absl::ZeroDuration());
    obs::LogEvent(obs::LogLevel::kInfo, "stopped", {});
    return reason;
  }

  Unfinished unfinished() const override {
    MutexLock lock(&drain_mu_);
    return {drain_ == nullptr ? 0 : drain_->in_flight(), load_state_ == LoadState::kLoading};
  }

 private:
  void SetDrain(const transport::Drain* drain) {
    MutexLock lock(&drain_mu_);
    drain_ = drain;
  }

  // Binds the addresses of metrics. Connections wait for StartMetrics: an address that is taken is
  // an error before clients can reach the server.
  absl::Status ListenForMetrics() {
    const transport::Options& transport = options_.rpc.transport;
    for (const std::string& text : options_.metrics_addresses) {
      const auto address = transport::ParseListenAddress(text);
      if (!address.ok()) return Prefixed("--metrics_address", address.status());
      auto listening =
          transport::ListenOn(*address, transport.unix_socket_mode, transport.keepalive_timeout);
      if (!listening.ok()) return Prefixed("--metrics_address", listening.status());
      metrics_listening_.push_back(*std::move(listening));
    }
    return absl::OkStatus();
  }

  absl::Status StartMetrics() {
    if (metrics_listening_.empty()) return absl::OkStatus();
    const auto snapshots = [rpc = rpc_.get()](bool plans) {
      return rpc->Snapshot(plans ? services::Plans::kIncluded : services::Plans::kLeftOut);
    };
    const auto guard = [rpc = rpc_.get()](const std::vector<std::string>& authorizations) {
      return rpc->admission()
          ->access()
          .Admit("metrics", security::Need::kMetrics, {.authorizations = authorizations})
          .status();
    };
    obs::GpuStatisticsOptions gpus;
    for (const Device* device : engine_->devices()) {
      gpus.pci_bus_ids.push_back(device->info().pci_bus_id);
    }
    std::vector<UniqueFd> sockets;
    for (transport::ListenSockets& listening : metrics_listening_) {
      for (UniqueFd& socket : listening.sockets) sockets.push_back(std::move(socket));
    }
    auto started = obs::MetricsServer::Start(std::move(sockets), snapshots, guard, std::move(gpus));
    if (!started.ok()) return Prefixed("--metrics_address", started.status());
    metrics_ = *std::move(started);
    for (size_t i = 0; i < metrics_listening_.size(); ++i) {
      obs::LogEvent(
          obs::LogLevel::kInfo, "metrics",
          {{"address", options_.metrics_addresses[i]}, {"port", metrics_listening_[i].port}});
    }
    return absl::OkStatus();
  }

  // Runs on the loader thread.
  void LoadAll(const std::vector<std::string>& names) {
    const repository::LoadedAtStart result =
        repository::LoadAtStart(names, stopping_, models_.get());
    if (stopping_) return;
    if (!result.failed.empty() && !options_.keep_going) {
      load_error_ = result.Error();
      load_state_ = LoadState::kFailed;
      return;
    }
    Ready(names.empty(), result.loaded, result.failed.size());
  }

  void Ready(bool none_there, size_t loaded, size_t failed) {
    if (loaded == 0) {
      obs::LogEvent(obs::LogLevel::kWarning,
                    none_there ? "the repository holds no model; serving until one is loaded"
                               : "no model could be loaded; serving until one is loaded",
                    {{"model_repository", obs::LogText(options_.model_repository, 1024)}});
    }
    rpc_->SetStarting(false);
    rpc_->SetServing(true);
    obs::LogEvent(obs::LogLevel::kInfo, "ready", {{"models", loaded}, {"failed", failed}});
    load_state_ = LoadState::kDone;
  }

  // On the loader thread, until the server ends. The server is ready once files that were written
  // to just before the start have been loaded, or after the settle time.
  void Watch(const std::vector<std::string>& names) {
    const bool all = options_.load_models.empty();
    repository::Reconciler reconciler(options_.watch.settle,
                                      all ? std::vector<std::string>() : names, models_.get());
    const absl::Time settled = absl::Now() + options_.watch.settle;
    const absl::Duration soon = std::min(options_.watch.interval, absl::Milliseconds(250));
    size_t loaded = 0, failed = 0;
    for (;;) {
      const absl::Time now = absl::Now();
      const repository::Reconciler::Result result = reconciler.Reconcile(now);
      loaded += static_cast<size_t>(result.loaded);
      failed += static_cast<size_t>(result.failed);
      if (stopping_) return;
      if (result.waiting == 0 || now >= settled) break;
      if (!pause_.WaitFor(soon)) return;
    }
    Ready(names.empty(), loaded, failed);
    while (pause_.WaitFor(options_.watch.interval)) reconciler.Reconcile(absl::Now());
  }

  absl::Status WaitForReason(int stop_fd) {
    IdleWatch idle;
    for (;;) {
      pollfd fd = {.fd = stop_fd, .events = POLLIN};
      if (poll(&fd, 1, kPollMs) > 0) return absl::OkStatus();
      if (load_state_ == LoadState::kFailed) return load_error_;
      AWQD_RETURN_IF_ERROR(WatchDevices());
      if (idle.Tick(absl::Now(), ProcessorTime())) {
        engine_->FreeKeptMemory();
        ReturnFreeMemory();
      }
    }
  }

  // Logs and reports in health which devices have failed since, or work again. INTERNAL when none
  // works.
  absl::Status WatchDevices() {
    size_t working = 0;
    for (OpenedDevice& opened : devices_) {
      const std::string& id = opened.device->info().id;
      const bool healthy = opened.device->healthy();
      working += healthy ? 1 : 0;
      if (std::exchange(opened.healthy, healthy) == healthy) continue;
      obs::LogEvent(healthy ? obs::LogLevel::kInfo : obs::LogLevel::kError,
                    healthy ? "device works again" : "device failed", {{"id", id}});
      rpc_->SetDeviceServing(id, healthy);
    }
    if (working == 0) {
      return absl::InternalError(absl::StrCat("device ", devices_.back().device->info().id,
                                              " faulted; nothing on it can be trusted any more"));
    }
    const bool whole = working == devices_.size() || models_->AnyServedWhole();
    if (std::exchange(whole_, whole) != whole) rpc_->SetAbleToServe(whole);
    return absl::OkStatus();
  }

  void Stop(absl::Duration delay) {
    if (rpc_ != nullptr) {
      stopping_ = true;
      rpc_->SetStarting(false);
      rpc_->SetServing(false);
      models_->CancelLoads();
      pause_.End();
      const absl::Time drained = absl::Now() + delay;
      if (loader_.joinable()) loader_.join();
      if (idle_.joinable()) idle_.join();
      rpc_->SetServing(false);  // the loader may be about to say the opposite
      absl::SleepFor(drained - absl::Now());
      engine_->Hurry();
      rpc_->Shutdown(options_.drain_timeout);
      obs::LogEvent(obs::LogLevel::kInfo, "calls ended", {});
    }
    if (engine_ != nullptr) engine_->Drain();
    SetDrain(nullptr);
    metrics_listening_.clear();  // removes socket files
    metrics_ = nullptr;          // it reads the members below; until here it reports the drain
    rpc_ = nullptr;
    engine_ = nullptr;
    models_ = nullptr;
    devices_.clear();
  }

  enum class LoadState { kLoading, kDone, kFailed };

  const Options options_;
  std::vector<OpenedDevice> devices_;
  std::unique_ptr<repository::ModelStore> models_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<obs::CallRecorder> recorder_;
  std::unique_ptr<services::RpcServer> rpc_;
  mutable Mutex drain_mu_;
  const transport::Drain* drain_ ABSL_GUARDED_BY(drain_mu_) = nullptr;  // of rpc_
  std::vector<transport::ListenSockets> metrics_listening_;             // one for each address
  std::unique_ptr<obs::MetricsServer> metrics_;
  std::thread loader_;  // loads at start, then reconciles with --watch
  std::thread idle_;
  Pause pause_;  // for both threads
  std::atomic<LoadState> load_state_{LoadState::kLoading};
  std::atomic<bool> stopping_{false};
  bool whole_ = true;        // some model can be served completely, or none was loaded
  absl::Status load_error_;  // written before load_state_ says kFailed
};

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Create(const Options& options,
                                                       const DeviceOpener& open_device) {
  auto server = std::make_unique<ServerImpl>(options);
  AWQD_RETURN_IF_ERROR(server->Start(open_device));
  return std::unique_ptr<Server>(std::move(server));
}

}  // namespace awqd
