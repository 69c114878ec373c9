// Maps paths to answers, and samples the time series on a thread.
#include "server/obs/metrics_server.h"

#include <chrono>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "server/obs/exposition.h"
#include "server/obs/http_server.h"

namespace awqd::obs {
namespace {

// Turns "Basic", which browsers send with a name and the token as password, into "Bearer".
std::vector<std::string> BasicToBearer(std::vector<std::string> authorizations) {
  for (std::string& value : authorizations) {
    absl::string_view rest = value;
    std::string pair;
    if (!absl::ConsumePrefix(&rest, "Basic ") || !absl::Base64Unescape(rest, &pair)) continue;
    const size_t colon = pair.find(':');
    if (colon != std::string::npos) value = absl::StrCat("Bearer ", pair.substr(colon + 1));
  }
  return authorizations;
}

class MetricsServerImpl final : public MetricsServer {
 public:
  MetricsServerImpl(SnapshotSource snapshots, MetricsGuard guard, GpuStatisticsOptions gpus)
      : snapshots_(std::move(snapshots)), guard_(std::move(guard)), gpus_(std::move(gpus)) {}
  ~MetricsServerImpl() override {
    http_ = nullptr;
    {
      MutexLock lock(&mu_);
      stopping_ = true;
      stop_.NotifyAll();
    }
    if (sampler_.joinable()) sampler_.join();
  }

  absl::Status Listen(const std::string& address) {
    AWQD_ASSIGN_OR_RETURN(http_, HttpServer::Start(address, [this](const HttpRequest& request) {
                            return Answer(request);
                          }));
    sampler_ = std::thread([this] { Sample(); });
    return absl::OkStatus();
  }

  int port() const override { return http_->port(); }

 private:
  HttpAnswer Answer(const HttpRequest& request) {
    const std::string& path = request.path;
    if (path == "/livez") return {.body = "ok\n"};
    if (path == "/readyz") return Ready();
    if (guard_ != nullptr) {
      const absl::Status status = guard_(BasicToBearer(request.authorizations));
      if (!status.ok()) {
        return {.code = absl::IsUnauthenticated(status) ? 401 : 403,
                .body = std::string(status.message()) + "\n"};
      }
    }
    if (path == "/metrics") {
      return {.type = "text/plain; version=0.0.4; charset=utf-8",
              .body = PrometheusText(AddGpuStatistics(snapshots_(false)))};
    }
    if (path == "/api/status") {
      return {.type = "application/json",
              .body = StatusJson(snapshots_(true), time_series_.points())};
    }
    if (path == "/") return File("index.html", "text/html; charset=utf-8");
    if (path == "/page.css") return File("page.css", "text/css; charset=utf-8");
    if (path == "/page.js") return File("page.js", "text/javascript; charset=utf-8");
    return {.code = 404,
            .body = "not found; the paths are /, /metrics, /livez, /readyz and /api/status\n"};
  }

  Snapshot AddGpuStatistics(Snapshot snapshot) {
    const std::map<std::string, GpuStatistics> gpus = gpus_.Read();
    for (DeviceStats& device : snapshot.devices) {
      const auto it = gpus.find(device.pci_bus_id);
      if (it != gpus.end()) device.gpu = it->second;
    }
    return snapshot;
  }

  HttpAnswer Ready() const {
    const Snapshot now = snapshots_(false);
    for (const DeviceStats& device : now.devices) {
      if (!device.healthy) return {.code = 503, .body = "device " + device.id + " has failed\n"};
    }
    if (now.serving) return {.body = "ok\n"};
    return {.code = 503, .body = "models are still being loaded, or the server is stopping\n"};
  }

  static HttpAnswer File(absl::string_view name, std::string type) {
    return {.type = std::move(type), .body = std::string(PageFile(name))};
  }

  void Sample() {
    for (;;) {
      time_series_.AddSnapshot(snapshots_(false));
      const auto next =
          std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(TimeSeries::kInterval);
      MutexLock lock(&mu_);
      while (!stopping_ && std::chrono::steady_clock::now() < next) stop_.WaitUntil(&mu_, next);
      if (stopping_) return;
    }
  }

  const SnapshotSource snapshots_;
  const MetricsGuard guard_;
  GpuStatisticsReader gpus_;
  TimeSeries time_series_;
  Mutex mu_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::unique_ptr<HttpServer> http_;
  std::thread sampler_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& address,
                                                                    SnapshotSource snapshots,
                                                                    MetricsGuard guard,
                                                                    GpuStatisticsOptions gpus) {
  auto server =
      std::make_unique<MetricsServerImpl>(std::move(snapshots), std::move(guard), std::move(gpus));
  AWQD_RETURN_IF_ERROR(server->Listen(address));
  return std::unique_ptr<MetricsServer>(std::move(server));
}

}  // namespace awqd::obs
