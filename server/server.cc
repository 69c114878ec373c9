// Starts, waits and stops.
#include "server/server.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/file.h"
#include "kernels/kernels.h"
#include "server/engine/routing_engine.h"
#include "server/idle_memory.h"
#include "server/obs/call_recorder.h"
#include "server/obs/logging.h"
#include "server/obs/metrics_server.h"
#include "server/open_devices.h"
#include "server/otlp/otlp_exporter.h"
#include "server/pause.h"
#include "server/repository/idle_unloader.h"
#include "server/repository/model_store.h"
#include "server/repository/reconciler.h"
#include "server/repository/startup_loads.h"
#include "server/security/access.h"
#include "server/services/rpc_server.h"
#include "server/transport/drain.h"

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
        obs::LogLevel::kInfo, "plan",
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

absl::StatusOr<std::unique_ptr<obs::Tracer>> MakeTracer(const TraceOptions& options) {
  std::unique_ptr<obs::SpanExporter> exporter;
  if (!options.otlp_endpoint.empty()) {
    exporter = otlp::MakeOtlpExporter(options.otlp_endpoint, AWQD_VERSION);
  } else if (!options.file.empty()) {
    absl::StatusOr<std::unique_ptr<obs::SpanExporter>> file = obs::OpenSpanFile(options.file);
    if (!file.ok()) return Prefixed("--trace_file", file.status());
    exporter = *std::move(file);
  } else {
    return std::unique_ptr<obs::Tracer>();
  }
  return std::make_unique<obs::Tracer>(options.sample, std::move(exporter));
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
    AWQD_ASSIGN_OR_RETURN(std::vector<std::string> names,
                          repository::ChooseModels(options_.load_models, *models_));
    AWQD_ASSIGN_OR_RETURN(auto engines, MakeEngines(devices, options_.engine));
    engine_ = engine::MakeRoutingEngine(std::move(engines));
    models_->set_before_serving(
        [this](const model::Model& model) { return WarmUp(model, *engine_); });
    AWQD_ASSIGN_OR_RETURN(recorder_, MakeCallRecorder(options_));
    services::Options rpc = options_.rpc;
    rpc.transport.recorder = recorder_.get();
    AWQD_ASSIGN_OR_RETURN(rpc_, services::RpcServer::Start(rpc, engine_.get(), models_.get()));
    SetGate(rpc_->admission()->drain());
    rpc_->SetStarting(true);
    for (const OpenedDevice& opened : devices_) {
      const DeviceInfo& info = opened.device->info();
      obs::LogEvent(obs::LogLevel::kInfo, "device",
                    {{"id", info.id}, {"name", info.name}, {"why", opened.why}});
    }
    for (const std::string& address : rpc_->addresses()) {
      obs::LogEvent(obs::LogLevel::kInfo, absl::StrCat("listening on ", address), {});
    }
    AWQD_RETURN_IF_ERROR(StartMetrics());
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
    MutexLock lock(&gate_mu_);
    return {gate_ == nullptr ? 0 : gate_->in_flight(), load_state_ == LoadState::kLoading};
  }

 private:
  void SetGate(const transport::Drain* gate) {
    MutexLock lock(&gate_mu_);
    gate_ = gate;
  }

  absl::Status StartMetrics() {
    if (options_.metrics_address.empty()) return absl::OkStatus();
    const auto snapshots = [rpc = rpc_.get()](bool plans) {
      return rpc->Snapshot(plans ? services::Plans::kIncluded : services::Plans::kLeftOut);
    };
    const auto guard = [rpc = rpc_.get()](const std::vector<std::string>& authorizations) {
      const security::HttpCaller caller(authorizations);
      return rpc->admission()->access().Admit("metrics", security::Need::kMetrics, caller).status();
    };
    obs::GpuStatisticsOptions gpus;
    for (const Device* device : engine_->devices()) {
      gpus.pci_bus_ids.push_back(device->info().pci_bus_id);
    }
    auto started =
        obs::MetricsServer::Start(options_.metrics_address, snapshots, guard, std::move(gpus));
    if (!started.ok()) return Prefixed("--metrics_address", started.status());
    metrics_ = *std::move(started);
    obs::LogEvent(obs::LogLevel::kInfo, "metrics",
                  {{"address", options_.metrics_address}, {"port", metrics_->port()}});
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
    SetGate(nullptr);
    metrics_ = nullptr;  // it reads the members below; until here it reports the drain
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
  mutable Mutex gate_mu_;
  const transport::Drain* gate_ ABSL_GUARDED_BY(gate_mu_) = nullptr;  // of rpc_
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
