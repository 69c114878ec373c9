// Paths to answers, and the thread that keeps the history.
#include "server/obs/metrics_server.h"

#include <chrono>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "server/obs/exposition.h"
#include "server/obs/history.h"
#include "server/obs/http_server.h"
#include "server/obs/page_files.h"
#include "server/obs/status_json.h"

namespace awqd::obs {
namespace {

class MetricsServerImpl final : public MetricsServer {
 public:
  explicit MetricsServerImpl(Snapshots snapshots) : snapshots_(std::move(snapshots)) {}
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
    AWQD_ASSIGN_OR_RETURN(
        http_, HttpServer::Start(address, [this](absl::string_view path) { return Answer(path); }));
    sampler_ = std::thread([this] { Sample(); });
    return absl::OkStatus();
  }

  int port() const override { return http_->port(); }

 private:
  HttpAnswer Answer(absl::string_view path) const {
    if (path == "/metrics") {
      return {.type = "text/plain; version=0.0.4; charset=utf-8",
              .body = PrometheusText(snapshots_(false))};
    }
    if (path == "/livez") return {.body = "ok\n"};
    if (path == "/readyz") return Ready();
    if (path == "/api/status") {
      return {.type = "application/json", .body = StatusJson(snapshots_(true), history_.points())};
    }
    if (path == "/") return File("index.html", "text/html; charset=utf-8");
    if (path == "/page.css") return File("page.css", "text/css; charset=utf-8");
    if (path == "/page.js") return File("page.js", "text/javascript; charset=utf-8");
    return {.code = 404, .body = "there are /, /metrics, /livez, /readyz and /api/status\n"};
  }

  HttpAnswer Ready() const {
    const Snapshot now = snapshots_(false);
    for (const DeviceStats& device : now.devices) {
      if (!device.healthy) return {.code = 503, .body = "device " + device.id + " has failed\n"};
    }
    if (now.serving) return {.body = "ok\n"};
    return {.code = 503, .body = "models are being loaded, or the server stops\n"};
  }

  static HttpAnswer File(absl::string_view name, std::string type) {
    return {.type = std::move(type), .body = std::string(PageFile(name))};
  }

  void Sample() {
    for (;;) {
      history_.Add(snapshots_(false));
      const auto next =
          std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(History::kInterval);
      MutexLock lock(&mu_);
      while (!stopping_ && std::chrono::steady_clock::now() < next) stop_.WaitUntil(&mu_, next);
      if (stopping_) return;
    }
  }

  const Snapshots snapshots_;
  History history_;
  Mutex mu_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::unique_ptr<HttpServer> http_;
  std::thread sampler_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& address,
                                                                    Snapshots snapshots) {
  auto server = std::make_unique<MetricsServerImpl>(std::move(snapshots));
  AWQD_RETURN_IF_ERROR(server->Listen(address));
  return std::unique_ptr<MetricsServer>(std::move(server));
}

}  // namespace awqd::obs
