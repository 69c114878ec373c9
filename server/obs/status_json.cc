// One function for each member.
#include "server/obs/status_json.h"

#include "absl/status/status.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"

namespace awqd::obs {
namespace {

using nlohmann::json;

json ModelJson(const ModelStats& model) {
  json bytes = json::object();
  for (const auto& [device, held] : model.bytes) bytes[device] = held;
  return {{"name", model.name},
          {"state", model.state},
          {"loaded_share", model.loaded_share},
          {"format", model.format},
          {"version", model.version},
          {"weights", model.weights},
          {"requests", model.requests},
          {"failed", model.failed},
          {"tokens", model.tokens},
          {"bytes", bytes},
          {"kernels", model.kernels}};
}

json DeviceJson(const DeviceStats& device) {
  json kernels = json::array();
  for (const KernelStats& kernel : device.kernels) {
    kernels.push_back({{"kernel", kernel.kernel},
                       {"batches", kernel.batches},
                       {"compute_s", absl::ToDoubleSeconds(kernel.compute)}});
  }
  return {{"id", device.id},
          {"name", device.name},
          {"healthy", device.healthy},
          {"memory_bytes", device.memory_bytes},
          {"free_bytes", device.free_bytes},
          {"weights_bytes", device.weights_bytes},
          {"staging_bytes", device.staging_lent_bytes + device.staging_kept_bytes},
          {"queued", device.queued_requests},
          {"batches", device.batch_tokens.total()},
          {"tokens", device.batch_tokens.sum},
          {"requests", device.batch_requests.sum},
          {"kernels", kernels}};
}

json MethodJson(const MethodStats& method) {
  json codes = json::object();
  HistogramData all;
  for (int code = 0; code < MethodStats::kCodes; ++code) {
    all.Add(method.durations_ns[code]);
    const int64_t calls = method.durations_ns[code].total();
    if (calls == 0) continue;
    codes[absl::StatusCodeToString(static_cast<absl::StatusCode>(code))] = calls;
  }
  return {{"method", method.method},
          {"started", method.started},
          {"codes", codes},
          {"p50_ms", Quantile(all, 0.5) * 1e-6},
          {"p99_ms", Quantile(all, 0.99) * 1e-6}};
}

json PointJson(const HistoryPoint& point) {
  return {{"t", absl::ToUnixMillis(point.time)},
          {"requests_per_s", point.requests_per_s},
          {"tokens_per_s", point.tokens_per_s},
          {"failed_per_s", point.failed_per_s},
          {"p50_ms", point.p50_ms},
          {"p99_ms", point.p99_ms},
          {"batch_tokens", point.batch_tokens},
          {"queue_ms", point.queue_ms},
          {"queued", point.queued},
          {"in_flight_bytes", point.in_flight_bytes},
          {"resident_bytes", point.resident_bytes},
          {"device_bytes", point.device_bytes}};
}

}  // namespace

std::string StatusJson(const Snapshot& snapshot, const std::vector<HistoryPoint>& history) {
  json out = {{"version", snapshot.version},
              {"ready", snapshot.serving},
              {"time_ms", absl::ToUnixMillis(snapshot.time)},
              {"uptime_s", absl::ToDoubleSeconds(snapshot.time - snapshot.process.started)},
              {"in_flight_bytes", snapshot.in_flight_bytes},
              {"in_flight_limit_bytes", snapshot.in_flight_limit_bytes},
              {"queue_limit_requests", snapshot.queue_limit_requests},
              {"resident_bytes", snapshot.process.resident_bytes},
              {"threads", snapshot.process.threads},
              {"models", json::array()},
              {"devices", json::array()},
              {"methods", json::array()},
              {"history", json::array()}};
  for (const ModelStats& model : snapshot.models) out["models"].push_back(ModelJson(model));
  for (const DeviceStats& device : snapshot.devices) out["devices"].push_back(DeviceJson(device));
  for (const MethodStats& method : snapshot.methods) {
    if (method.started > 0) out["methods"].push_back(MethodJson(method));
  }
  for (const HistoryPoint& point : history) out["history"].push_back(PointJson(point));
  return out.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace awqd::obs
