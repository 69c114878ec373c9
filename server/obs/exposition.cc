// Renders a snapshot as Prometheus's text, with prometheus-cpp, and as the page's JSON.
#include "server/obs/exposition.h"

#include <sstream>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace awqd::obs {
namespace {

using Labels = std::vector<std::pair<absl::string_view, absl::string_view>>;

constexpr double kNano = 1e-9;

std::string CodeName(int code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

// A family of metrics; its series are shown in the order in which they are added.
class Family {
 public:
  Family(prometheus::MetricType type, absl::string_view name, absl::string_view help) {
    family_.type = type;
    family_.name = std::string(name);
    family_.help = std::string(help);
  }

  Family& AddSeries(const Labels& labels, double value) {
    prometheus::ClientMetric& metric = AddMetric(labels);
    metric.counter.value = metric.gauge.value = value;  // the type selects one
    return *this;
  }
  Family& AddSeries(const Labels& labels, int64_t value) {
    return AddSeries(labels, static_cast<double>(value));
  }
  Family& AddSeries(const Labels& labels, absl::Duration value) {
    return AddSeries(labels, absl::ToDoubleSeconds(value));
  }

  // Shows values and bounds times `unit`. Data without counts are shown as counts of 0.
  Family& AddSeries(const Labels& labels, const HistogramData& data, double unit) {
    prometheus::ClientMetric::Histogram& out = AddMetric(labels).histogram;
    uint64_t below = 0;
    for (size_t i = 0; i < data.bounds.size(); ++i) {
      below += static_cast<uint64_t>(data.counts.empty() ? 0 : data.counts[i]);
      out.bucket.push_back({below, static_cast<double>(data.bounds[i]) * unit});
    }
    out.sample_count = static_cast<uint64_t>(data.total());
    out.sample_sum = static_cast<double>(data.sum) * unit;
    return *this;
  }

  bool empty() const { return family_.metric.empty(); }
  prometheus::MetricFamily Release() { return std::move(family_); }

 private:
  prometheus::ClientMetric& AddMetric(const Labels& labels) {
    prometheus::ClientMetric& metric = family_.metric.emplace_back();
    for (const auto& [name, value] : labels) {
      metric.label.push_back({std::string(name), std::string(value)});
    }
    return metric;
  }

  prometheus::MetricFamily family_;
};

Family Counter(absl::string_view name, absl::string_view help) {
  return Family(prometheus::MetricType::Counter, name, help);
}
Family Gauge(absl::string_view name, absl::string_view help) {
  return Family(prometheus::MetricType::Gauge, name, help);
}
Family Histograms(absl::string_view name, absl::string_view help) {
  return Family(prometheus::MetricType::Histogram, name, help);
}

// Builds the families of a snapshot.
class Exposition {
 public:
  explicit Exposition(const Snapshot& snapshot) : all_(snapshot) {
    ShowCalls();
    ShowBatches();
    ShowKernels();
    ShowQueue();
    ShowRefusals();
    ShowModels();
    ShowDevices();
    ShowProcess();
  }

  std::string Text() const {
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, families_);
    return out.str();
  }

 private:
  void Show(Family family) { families_.push_back(family.Release()); }

  // Shows a family with one series for each device.
  void ShowByDevice(Family family, int64_t DeviceStats::*value) {
    for (const DeviceStats& device : all_.devices) {
      family.AddSeries({{"device", device.id}}, device.*value);
    }
    Show(std::move(family));
  }
  void ShowByDevice(Family family, HistogramData DeviceStats::*data, double unit) {
    for (const DeviceStats& device : all_.devices) {
      family.AddSeries({{"device", device.id}}, device.*data, unit);
    }
    Show(std::move(family));
  }

  void ShowCalls() {
    Family started = Counter("grpc_server_call_started_total", "Calls that arrived.");
    Family active = Gauge("awqd_calls_active", "Calls that have arrived and have not ended.");
    Family durations = Histograms("grpc_server_call_duration_seconds",
                                  "Time from the arrival of a call until its status was known.");
    Family received = Histograms("grpc_server_call_rcvd_total_compressed_message_size_bytes",
                                 "Bytes of the messages that a call received.");
    Family sent = Histograms("grpc_server_call_sent_total_compressed_message_size_bytes",
                             "Bytes of the messages that a call sent.");
    for (const MethodStats& method : all_.methods) {
      const Labels name = {{"grpc_method", method.method}};
      int64_t ended = 0;
      for (int code = 0; code < MethodStats::kCodes; ++code) {
        const int64_t calls = method.durations_ns[code].total();
        ended += calls;
        // Codes that no call ended with have no series: most of the 17 never occur.
        if (calls == 0 && code != 0) continue;
        durations.AddSeries({{"grpc_method", method.method}, {"grpc_status", CodeName(code)}},
                            method.durations_ns[code], kNano);
      }
      started.AddSeries(name, method.started);
      active.AddSeries(name, method.started - ended);
      received.AddSeries(name, method.received_bytes, 1);
      sent.AddSeries(name, method.sent_bytes, 1);
    }
    for (Family* family : {&started, &active, &durations, &received, &sent}) {
      Show(std::move(*family));
    }
  }

  void ShowBatches() {
    ShowByDevice(Histograms("awqd_queue_duration_seconds",
                            "Time that a request waited in the queue of a device."),
                 &DeviceStats::queue_ns, kNano);
    ShowByDevice(Histograms("awqd_compute_duration_seconds",
                            "Time that a device took for a batch, including copies."),
                 &DeviceStats::compute_ns, kNano);
    ShowByDevice(Histograms("awqd_batch_tokens", "Tokens in a batch."), &DeviceStats::batch_tokens,
                 1);
    ShowByDevice(Histograms("awqd_batch_requests", "Requests in a batch."),
                 &DeviceStats::batch_requests, 1);
    ShowByDevice(Counter("awqd_merged_requests_total",
                         "Requests that ran in one batch with at least one other request."),
                 &DeviceStats::merged_requests);
    ShowByDevice(Counter("awqd_batches_failed_total", "Batches that failed on the device."),
                 &DeviceStats::batches_failed);
  }

  void ShowKernels() {
    Family batches = Counter("awqd_kernel_batches_total", "Batches that ran these kernels.");
    Family time = Counter("awqd_kernel_compute_seconds_total",
                          "Compute time of the batches that ran these kernels.");
    for (const DeviceStats& device : all_.devices) {
      for (const KernelStats& kernel : device.kernels) {
        const Labels labels = {{"device", device.id}, {"kernel", kernel.kernel}};
        batches.AddSeries(labels, kernel.batches);
        time.AddSeries(labels, kernel.compute);
      }
    }
    Show(std::move(batches));
    Show(std::move(time));
  }

  void ShowQueue() {
    ShowByDevice(Gauge("awqd_queued_requests", "Requests that wait for the device."),
                 &DeviceStats::queued_requests);
    Show(
        Gauge("awqd_queue_limit_requests", "Largest number of requests that may wait for a device.")
            .AddSeries({}, all_.queue_limit_requests));
    Show(Gauge("awqd_in_flight_bytes", "Bytes of requests and answers in flight.")
             .AddSeries({}, all_.in_flight_bytes));
    Show(Gauge("awqd_in_flight_limit_bytes",
               "Largest number of bytes that may be in flight; 0: no limit.")
             .AddSeries({}, all_.in_flight_limit_bytes));
  }

  void ShowRefusals() {
    int64_t full = 0, draining = 0, expired = 0, cancelled = 0;
    for (const DeviceStats& device : all_.devices) {
      full += device.queue_full;
      draining += device.queue_draining;
      expired += device.queue_expired;
      cancelled += device.queue_cancelled;
    }
    Show(Counter("awqd_refused_requests_total", "Requests that were not computed, by reason.")
             .AddSeries({{"reason", "queue_full"}}, full)
             .AddSeries({{"reason", "in_flight_bytes"}}, all_.in_flight_refused)
             .AddSeries({{"reason", "draining"}}, draining + all_.turned_away)
             .AddSeries({{"reason", "deadline_in_queue"}}, expired)
             .AddSeries({{"reason", "cancelled_in_queue"}}, cancelled));
  }

  void ShowModels() {
    Family requests =
        Counter("awqd_model_requests_total", "Requests of the model that were computed.");
    Family failed =
        Counter("awqd_model_requests_failed_total", "Requests of the model whose batch failed.");
    Family tokens = Counter("awqd_model_tokens_total", "Tokens computed for the model.");
    Family queue = Counter("awqd_model_queue_seconds_total",
                           "Time that requests of the model waited in queues.");
    Family bytes = Gauge("awqd_model_weights_bytes", "Bytes of the model's weights on the device.");
    for (const ModelStats& model : all_.models) {
      const Labels name = {{"model", model.name}};
      requests.AddSeries(name, model.requests);
      failed.AddSeries(name, model.failed);
      tokens.AddSeries(name, model.tokens);
      queue.AddSeries(name, model.queue);
      for (const auto& [device, held] : model.bytes) {
        bytes.AddSeries({{"model", model.name}, {"device", device}}, held);
      }
    }
    for (Family* family : {&requests, &failed, &tokens, &queue, &bytes}) Show(std::move(*family));
    Show(Histograms("awqd_model_load_duration_seconds", "Time that a load took, by its outcome.")
             .AddSeries({{"outcome", "ok"}}, all_.loads_ns, kNano)
             .AddSeries({{"outcome", "failed"}}, all_.failed_loads_ns, kNano));
    Show(Gauge("awqd_ready", "1 if every model that was requested at start is served.")
             .AddSeries({}, int64_t{all_.serving}));
  }

  void ShowDevices() {
    ShowByDevice(Gauge("awqd_device_memory_bytes", "Memory of the device."),
                 &DeviceStats::memory_bytes);
    ShowByDevice(Gauge("awqd_device_memory_free_bytes",
                       "Memory of the device that awqd may still allocate."),
                 &DeviceStats::free_bytes);
    ShowByDevice(Gauge("awqd_device_weights_bytes", "Weights of all models on the device."),
                 &DeviceStats::weights_bytes);
    Family faulted = Gauge("awqd_device_faulted", "1 if the device has failed permanently.");
    Family busy = Gauge("awqd_device_utilization_ratio",
                        "Fraction of time in which the GPU ran kernels of any process.");
    Family used =
        Gauge("awqd_device_memory_used_bytes", "Memory of the GPU that all processes use.");
    Family staging = Gauge("awqd_staging_bytes",
                           "Host memory for payloads, by state: in use, or kept for reuse.");
    for (const DeviceStats& device : all_.devices) {
      const Labels name = {{"device", device.id}};
      faulted.AddSeries(name, int64_t{!device.healthy});
      if (device.gpu) {
        busy.AddSeries(name, device.gpu->utilization);
        used.AddSeries(name, device.gpu->memory_used_bytes);
      }
      staging.AddSeries({{"device", device.id}, {"state", "in_use"}}, device.staging_lent_bytes)
          .AddSeries({{"device", device.id}, {"state", "kept"}}, device.staging_kept_bytes);
    }
    Show(std::move(faulted));
    // Without NVML's statistics these two families are absent.
    if (!busy.empty()) Show(std::move(busy));
    if (!used.empty()) Show(std::move(used));
    Show(std::move(staging));
    ShowByDevice(Counter("awqd_staging_allocations_total",
                         "Staging buffers that were allocated because no kept one fitted."),
                 &DeviceStats::staging_misses);
    ShowByDevice(Counter("awqd_staging_copied_bytes_total", "Payload bytes that the host copied."),
                 &DeviceStats::staging_copied);
  }

  void ShowProcess() {
    const ProcessStats& process = all_.process;
    Show(Counter("process_cpu_seconds_total", "CPU time of the process.")
             .AddSeries({}, process.cpu));
    Show(Gauge("process_resident_memory_bytes", "Resident memory.")
             .AddSeries({}, process.resident_bytes));
    Show(Gauge("process_virtual_memory_bytes", "Virtual memory.")
             .AddSeries({}, process.virtual_bytes));
    Show(Gauge("process_open_fds", "Open file descriptors.").AddSeries({}, process.open_fds));
    Show(Gauge("process_max_fds", "Largest number of open file descriptors.")
             .AddSeries({}, process.max_fds));
    Show(Gauge("process_threads", "Threads.").AddSeries({}, process.threads));
    Show(Gauge("process_start_time_seconds", "Start time of the process, since 1970.")
             .AddSeries({}, process.started - absl::UnixEpoch()));
    Show(Gauge("awqd_loop_longest_hold_seconds",
               "Longest time in the last minute that one event held a completion-queue thread.")
             .AddSeries({{"clock", "wall"}}, all_.loop_hold_wall)
             .AddSeries({{"clock", "processor"}}, all_.loop_hold_processor));
    Show(Counter("awqd_trace_spans_total", "Spans of traces, exported or dropped.")
             .AddSeries({{"outcome", "exported"}}, all_.exported_spans)
             .AddSeries({{"outcome", "dropped"}}, all_.dropped_spans));
    Show(Gauge("awqd_build_info", "1; the label has the version.")
             .AddSeries({{"version", all_.version}}, int64_t{1}));
  }

  const Snapshot& all_;
  std::vector<prometheus::MetricFamily> families_;
};

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
    all.Merge(method.durations_ns[code]);
    const int64_t calls = method.durations_ns[code].total();
    if (calls == 0) continue;
    codes[CodeName(code)] = calls;
  }
  return {{"method", method.method},
          {"started", method.started},
          {"codes", codes},
          {"p50_ms", all.Quantile(0.5) * 1e-6},
          {"p99_ms", all.Quantile(0.99) * 1e-6}};
}

json PointJson(const TimeSeriesPoint& point) {
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

std::string PrometheusText(const Snapshot& snapshot) { return Exposition(snapshot).Text(); }

std::string StatusJson(const Snapshot& snapshot, const std::vector<TimeSeriesPoint>& points) {
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
  for (const TimeSeriesPoint& point : points) out["history"].push_back(PointJson(point));
  return out.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace awqd::obs
