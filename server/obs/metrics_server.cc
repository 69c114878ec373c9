// Maps paths to answers, and samples the time series on a thread.
#include "server/obs/metrics_server.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status.h"

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

HttpAnswer AnswerFile(absl::string_view name, std::string type) {
  return {.type = std::move(type), .body = std::string(PageFile(name))};
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(std::vector<UniqueFd> sockets,
                                                                    SnapshotSource snapshots,
                                                                    MetricsGuard guard,
                                                                    GpuStatisticsOptions gpus) {
  std::unique_ptr<MetricsServer> server(
      new MetricsServer(std::move(snapshots), std::move(guard), std::move(gpus)));
  const auto answer = [server = server.get()](const HttpRequest& request) {
    return server->Answer(request);
  };
  AWQD_ASSIGN_OR_RETURN(server->http_, HttpServer::Start(std::move(sockets), answer));
  server->sampler_ = std::thread([server = server.get()] {
    do {
      server->time_series_.AddSnapshot(server->snapshots_(false));
    } while (server->pause_.WaitFor(TimeSeries::kInterval));
  });
  return server;
}

MetricsServer::~MetricsServer() {
  http_ = nullptr;
  pause_.End();
  if (sampler_.joinable()) sampler_.join();
}

HttpAnswer MetricsServer::Answer(const HttpRequest& request) {
  const std::string& path = request.path;
  if (path == "/livez") return {.body = "ok\n"};
  if (path == "/readyz") return AnswerReadiness();
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
  if (path == "/") return AnswerFile("index.html", "text/html; charset=utf-8");
  if (path == "/page.css") return AnswerFile("page.css", "text/css; charset=utf-8");
  // The page names it as its icon. Browsers ask for it beside every other path too.
  if (path == "/favicon.ico") return AnswerFile("icon.svg", "image/svg+xml");
  if (path == "/page.js") return AnswerFile("page.js", "text/javascript; charset=utf-8");
  return {.code = 404,
          .body = "not found; the paths are /, /metrics, /livez, /readyz and /api/status\n"};
}

HttpAnswer MetricsServer::AnswerReadiness() const {
  const Snapshot now = snapshots_(false);
  for (const DeviceStats& device : now.devices) {
    if (!device.healthy) return {.code = 503, .body = "device " + device.id + " has failed\n"};
  }
  if (now.serving) return {.body = "ok\n"};
  return {.code = 503, .body = "models are still being loaded, or the server is stopping\n"};
}

Snapshot MetricsServer::AddGpuStatistics(Snapshot snapshot) {
  const GpuStatisticsReader::Statistics gpus = gpus_.Read();
  for (DeviceStats& device : snapshot.devices) {
    const auto it = gpus.find(device.pci_bus_id);
    if (it != gpus.end()) device.gpu = it->second;
  }
  return snapshot;
}

}  // namespace awqd::obs
