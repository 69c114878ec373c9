// Renders a snapshot as Prometheus's text, with prometheus-cpp, and as the page's JSON.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <sstream>
#include <tuple>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"
#include "server/obs/snapshot.h"

namespace awqd::obs {

using nlohmann::json;

// Make these objects with these members. JSON has no NaN: it becomes null.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Quantile, ms, sign)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Lease, model, device, version, bytes, client)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DeviceStats, id, name, healthy, memory_bytes, free_bytes,
                                   used_bytes, weights_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ModelStats, name, state, message, loaded_share, format, version,
                                   weights, unserved_weights, requests, failed, tokens, in_time,
                                   lost, not_computed, kernels)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TimeSeriesPoint, requests_per_s, tokens_per_s, failed_per_s,
                                   in_time_per_s, lost_per_s, refused_per_s, p50, p99, batch_tokens,
                                   queue_ms, queued, in_flight_bytes, resident_bytes, device_bytes)

namespace {

using Labels = std::vector<std::pair<absl::string_view, absl::string_view>>;

constexpr double kNano = 1e-9;

std::string CodeName(int code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

// Rewrites the bounds of histograms as people type them. The library prints 16 digits, which show
// how a fraction was rounded: 0.0006000000000000001. No bound needs more than 15.
std::string WithShortBounds(absl::string_view text) {
  constexpr absl::string_view kLabel = "le=\"";
  std::string out;
  size_t copied = 0;
  for (size_t label = text.find(kLabel); label != text.npos; label = text.find(kLabel, copied)) {
    const size_t begin = label + kLabel.size();
    const size_t end = text.find('"', begin);
    const absl::string_view digits = text.substr(begin, end - begin);
    absl::StrAppend(&out, text.substr(copied, begin - copied));
    double bound = 0;
    if (absl::SimpleAtod(digits, &bound) && std::isfinite(bound)) {
      absl::StrAppendFormat(&out, "%.15g", bound);
    } else {
      absl::StrAppend(&out, digits);
    }
    copied = std::min(end, text.size());
  }
  absl::StrAppend(&out, text.substr(copied));
  return out;
}

// A family of metrics; its series are shown in the order in which they are added.
class Family {
 public:
  Family(prometheus::MetricType type, absl::string_view name, absl::string_view help) {
    family_.type = type;
    family_.name = std::string(name);
    family_.help = std::string(help);
  }

  // Shows a number times `unit`. A duration is shown in seconds.
  template <typename Number>
  Family& AddSeries(const Labels& labels, Number number, double unit = 1) {
    double value = 0;
    if constexpr (std::is_same_v<Number, absl::Duration>) {
      value = absl::ToDoubleSeconds(number);
    } else {
      value = static_cast<double>(number);
    }
    prometheus::ClientMetric& metric = AddMetric(labels);
    metric.counter.value = metric.gauge.value = value * unit;  // the type selects one
    return *this;
  }

  // Shows values and bounds times `unit`. Data without counts are shown as counts of 0.
  Family& AddSeries(const Labels& labels, const HistogramData& data, double unit = 1) {
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

Labels MakeLabels(const MethodStats& method) { return {{"grpc_method", method.method}}; }
Labels MakeLabels(const DeviceStats& device) { return {{"device", device.id}}; }
Labels MakeLabels(const ModelStats& model) { return {{"model", model.name}}; }

// A method has series from its first call on: most methods are never called.
bool HasSeries(const MethodStats& method) { return method.started > 0; }
template <typename Item>
bool HasSeries(const Item&) {
  return true;
}

// Builds the families of a snapshot.
class Exposition {
 public:
  explicit Exposition(const Snapshot& snapshot) : all_(snapshot) {
    ShowCalls();
    ShowDevices();
    ShowRefusals();
    ShowModels();
    ShowServer();
    ShowProcess();
  }

  std::string Text() const {
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, families_);
    return WithShortBounds(out.str());
  }

 private:
  void Show(Family family) { families_.push_back(family.Release()); }

  // Shows a family with one series for each item: `field` is a member of it or a function of it.
  template <typename Item, typename Field>
  void ShowEach(Family family, const std::vector<Item>& items, Field field, double unit = 1) {
    for (const Item& item : items) {
      if (!HasSeries(item)) continue;
      family.AddSeries(MakeLabels(item), std::invoke(field, item), unit);
    }
    Show(std::move(family));
  }

  void ShowCalls() {
    const std::vector<MethodStats>& methods = all_.methods;
    ShowEach(Counter("grpc_server_call_started_total", "Calls that arrived."), methods,
             &MethodStats::started);
    ShowEach(
        Gauge("awqd_calls_active", "Calls that have arrived and have not ended."), methods,
        [](const MethodStats& method) { return method.started - method.AllDurations().total(); });
    Family durations = Histograms("grpc_server_call_duration_seconds",
                                  "Time from the arrival of a call until its status was known.");
    for (const MethodStats& method : methods) {
      if (!HasSeries(method)) continue;
      for (int code = 0; code < MethodStats::kCodes; ++code) {
        const HistogramData& calls = method.durations_ns[code];
        // Codes that no call ended with have no series: most of the 17 never occur.
        if (calls.total() == 0 && code != 0) continue;
        durations.AddSeries({{"grpc_method", method.method}, {"grpc_status", CodeName(code)}},
                            calls, kNano);
      }
    }
    Show(std::move(durations));
    ShowEach(Histograms("grpc_server_call_rcvd_total_compressed_message_size_bytes",
                        "Bytes of the messages that a call received."),
             methods, &MethodStats::received_bytes);
    ShowEach(Histograms("grpc_server_call_sent_total_compressed_message_size_bytes",
                        "Bytes of the messages that a call sent."),
             methods, &MethodStats::sent_bytes);
  }

  void ShowDevices() {
    const std::vector<DeviceStats>& devices = all_.devices;
    ShowEach(Histograms("awqd_queue_duration_seconds",
                        "Time that a request waited in the queue of a device."),
             devices, &DeviceStats::queue_ns, kNano);
    ShowEach(Histograms("awqd_compute_duration_seconds",
                        "Time that a device took for a batch, including copies."),
             devices, &DeviceStats::compute_ns, kNano);
    ShowEach(Histograms("awqd_batch_tokens", "Tokens in a batch."), devices,
             &DeviceStats::batch_tokens);
    ShowEach(Histograms("awqd_batch_requests", "Requests in a batch."), devices,
             &DeviceStats::batch_requests);
    ShowEach(Counter("awqd_merged_requests_total",
                     "Requests that ran in one batch with at least one other request."),
             devices, &DeviceStats::merged_requests);
    ShowEach(Counter("awqd_batches_failed_total", "Batches that failed on the device."), devices,
             &DeviceStats::batches_failed);
    ShowEach(Gauge("awqd_queued_requests", "Requests that wait for the device."), devices,
             &DeviceStats::queued_requests);
    ShowEach(Gauge("awqd_device_memory_bytes", "Memory of the device."), devices,
             &DeviceStats::memory_bytes);
    ShowEach(Gauge("awqd_device_memory_free_bytes",
                   "Memory of the device that awqd may still allocate."),
             devices, &DeviceStats::free_bytes);
    ShowEach(Gauge("awqd_device_weights_bytes", "Weights of all models on the device."), devices,
             &DeviceStats::weights_bytes);
    ShowEach(Counter("awqd_staging_allocations_total",
                     "Staging buffers that were allocated because no kept one fitted."),
             devices, &DeviceStats::staging_misses);
    ShowEach(Counter("awqd_staging_copied_bytes_total", "Payload bytes that the host copied."),
             devices, &DeviceStats::staging_copied);
    ShowEach(Gauge("awqd_device_faulted", "1 if the device has failed permanently."), devices,
             [](const DeviceStats& device) { return int64_t{!device.healthy}; });
    Family busy = Gauge("awqd_device_utilization_ratio",
                        "Fraction of time in which the GPU ran kernels of any process.");
    Family used =
        Gauge("awqd_device_memory_used_bytes", "Memory of the GPU that all processes use.");
    Family staging = Gauge("awqd_staging_bytes",
                           "Host memory for payloads, by state: in use, or kept for reuse.");
    Family batches = Counter("awqd_kernel_batches_total", "Batches that ran these kernels.");
    Family time = Counter("awqd_kernel_compute_seconds_total",
                          "Compute time of the batches that ran these kernels.");
    for (const DeviceStats& device : devices) {
      if (device.gpu) {
        busy.AddSeries(MakeLabels(device), device.gpu->utilization);
        used.AddSeries(MakeLabels(device), device.gpu->memory_used_bytes);
      }
      staging.AddSeries({{"device", device.id}, {"state", "in_use"}}, device.staging_lent_bytes)
          .AddSeries({{"device", device.id}, {"state", "kept"}}, device.staging_kept_bytes);
      for (const KernelStats& kernel : device.kernels) {
        const Labels labels = {{"device", device.id}, {"kernel", kernel.kernel}};
        batches.AddSeries(labels, kernel.batches);
        time.AddSeries(labels, kernel.compute);
      }
    }
    // Without NVML's statistics its two families are absent.
    for (Family* family : {&busy, &used}) {
      if (!family->empty()) Show(std::move(*family));
    }
    for (Family* family : {&staging, &batches, &time}) Show(std::move(*family));
  }

  void ShowRefusals() {
    int64_t full = 0, too_late = 0, too_long = 0, draining = 0, expired = 0, cancelled = 0;
    for (const DeviceStats& device : all_.devices) {
      full += device.queue_full;
      too_late += device.queue_too_late;
      too_long += device.queue_too_long;
      draining += device.queue_draining;
      expired += device.queue_expired;
      cancelled += device.queue_cancelled;
    }
    Show(Counter("awqd_refused_requests_total", "Requests that were not computed, by reason.")
             .AddSeries({{"reason", "queue_full"}}, full)
             .AddSeries({{"reason", "queue_time"}}, too_long)
             .AddSeries({{"reason", "deadline"}}, too_late)
             .AddSeries({{"reason", "in_flight_bytes"}}, all_.in_flight_refused)
             .AddSeries({{"reason", "draining"}}, draining + all_.rejected)
             .AddSeries({{"reason", "deadline_in_queue"}}, expired)
             .AddSeries({{"reason", "cancelled_in_queue"}}, cancelled));
  }

  void ShowModels() {
    ShowEach(Counter("awqd_model_requests_total", "Requests of the model that were computed."),
             all_.models, &ModelStats::requests);
    ShowEach(
        Counter("awqd_model_requests_failed_total", "Requests of the model whose batch failed."),
        all_.models, &ModelStats::failed);
    ShowEach(Counter("awqd_model_tokens_total", "Tokens computed for the model."), all_.models,
             &ModelStats::tokens);
    ShowEach(Counter("awqd_model_queue_seconds_total",
                     "Time that requests of the model waited in queues."),
             all_.models, &ModelStats::queue);
    Family outcomes =
        Counter("awqd_model_outcomes_total",
                "Requests of the model, by outcome: in_time, a client got the result; lost, "
                "computed for a client that was gone or whose deadline had passed; not_computed, "
                "refused, expired or failed.");
    for (const ModelStats& model : all_.models) {
      outcomes.AddSeries({{"model", model.name}, {"outcome", "in_time"}}, model.in_time)
          .AddSeries({{"model", model.name}, {"outcome", "lost"}}, model.lost)
          .AddSeries({{"model", model.name}, {"outcome", "not_computed"}}, model.not_computed);
    }
    Show(std::move(outcomes));
    Family bytes = Gauge("awqd_model_weights_bytes", "Bytes of the model's weights on the device.");
    Family unserved = Gauge("awqd_model_unserved_weights",
                            "Quantised weights of the model's checkpoint that are not served.");
    for (const ModelStats& model : all_.models) {
      unserved.AddSeries({{"model", model.name}}, model.unserved_weights);
      for (const auto& [device, held] : model.bytes) {
        bytes.AddSeries({{"model", model.name}, {"device", device}}, held);
      }
    }
    Show(std::move(bytes));
    Show(std::move(unserved));
    Show(Histograms("awqd_model_load_duration_seconds", "Time that a load took, by its outcome.")
             .AddSeries({{"outcome", "ok"}}, all_.loads_ns, kNano)
             .AddSeries({{"outcome", "failed"}}, all_.failed_loads_ns, kNano));
    ShowModelStates();
    Show(Gauge("awqd_ready",
               "1 if every model that was requested at start is served, or was since unloaded or "
               "removed, and the server is not stopping.")
             .AddSeries({}, int64_t{all_.serving && !all_.start_models_failed}));
  }

  void ShowModelStates() {
    const auto count = [](const std::vector<ModelStats>& models, absl::string_view state) {
      return std::count_if(models.begin(), models.end(),
                           [&](const ModelStats& model) { return model.state == state; });
    };
    Family states = Gauge("awqd_models",
                          "Models by state; failed: not served, or without some of its weights "
                          "because a device failed.");
    for (const char* state : {"ready", "loading", "failed"}) {
      states.AddSeries({{"state", state}},
                       count(all_.models, state) + count(all_.failed_models, state));
    }
    states.AddSeries({{"state", "unloaded"}}, all_.unloaded_models);
    Show(std::move(states));
  }

  void ShowServer() {
    Show(
        Gauge("awqd_queue_limit_requests", "Largest number of requests that may wait for a device.")
            .AddSeries({}, all_.queue_limit_requests));
    Show(Gauge("awqd_in_flight_bytes", "Bytes of requests and answers in flight.")
             .AddSeries({}, all_.in_flight_bytes));
    Show(Gauge("awqd_in_flight_limit_bytes",
               "Largest number of bytes that may be in flight; 0: no limit.")
             .AddSeries({}, all_.in_flight_limit_bytes));
    Show(Gauge("awqd_loop_longest_hold_seconds",
               "Longest time in the last minute that one event held a completion-queue thread.")
             .AddSeries({{"clock", "wall"}}, all_.loop_hold_wall)
             .AddSeries({{"clock", "processor"}}, all_.loop_hold_processor));
    Family connections =
        Counter("awqd_connections_refused_total", "Connections that were refused, by reason.");
    for (const auto& [reason, count] : all_.refused_connections) {
      connections.AddSeries({{"reason", reason}}, count);
    }
    Show(std::move(connections));
    if (all_.leases) {
      Family leases = Gauge("awqd_leases", "Processes that have leased the weights of a model.");
      std::map<absl::string_view, int64_t> of_model;
      for (const Lease& lease : all_.leases->leases) ++of_model[lease.model];
      for (const auto& [model, count] : of_model) leases.AddSeries({{"model", model}}, count);
      Show(leases);
      Show(Counter("awqd_leases_refused_total", "Leases that were asked for and refused.")
               .AddSeries({}, all_.leases->refused));
    }
    if (all_.rings) {
      Show(
          Gauge("awqd_rings", "Rings of clients on this machine, and connections that ask for one.")
              .AddSeries({}, all_.rings->rings));
      Show(Gauge("awqd_ring_prepared_calls", "Calls that are prepared in rings.")
               .AddSeries({}, all_.rings->prepared_calls));
      Show(Counter("awqd_rings_refused_total",
                   "Rings that were refused, and those that were closed because their clients "
                   "broke the rules.")
               .AddSeries({{"reason", "refused"}}, all_.rings->refused)
               .AddSeries({{"reason", "broken"}}, all_.rings->broken));
      Show(Counter("awqd_ring_sleeps_total", "Times that the thread of the rings slept.")
               .AddSeries({}, all_.rings->sleeps));
    }
    if (const auto& shared = all_.shared_device_memory) {
      Show(Gauge("awqd_cuda_shared_memory_regions", "Regions of GPUs' memory that clients share.")
               .AddSeries({}, shared->regions));
      Show(Gauge("awqd_cuda_shared_memory_bytes", "Bytes of GPUs' memory that clients share.")
               .AddSeries({}, shared->bytes));
    }
    Family expiry = Gauge("awqd_tls_certificate_expiry_timestamp_seconds",
                          "Time since 1970 at which the server's certificate, or one of its "
                          "intermediate certificates, expires.");
    if (all_.certificate_expiry) {
      expiry.AddSeries({}, *all_.certificate_expiry - absl::UnixEpoch());
      Show(std::move(expiry));
    }
    Show(Counter("awqd_trace_spans_total", "Spans of traces, exported or dropped.")
             .AddSeries({{"outcome", "exported"}}, all_.exported_spans)
             .AddSeries({{"outcome", "dropped"}}, all_.dropped_spans));
    Show(Gauge("awqd_build_info", "1; the label has the version.")
             .AddSeries({{"version", all_.version}}, int64_t{1}));
  }

  void ShowProcess() {
    const ProcessStats& process = all_.process;
    Show(Counter("process_cpu_seconds_total", "CPU time of the process.")
             .AddSeries({}, process.cpu));
    Show(Gauge("process_start_time_seconds", "Start time of the process, since 1970.")
             .AddSeries({}, process.started - absl::UnixEpoch()));
    const std::tuple<const char*, const char*, int64_t> gauges[] = {
        {"process_resident_memory_bytes", "Resident memory.", process.resident_bytes},
        {"process_virtual_memory_bytes", "Virtual memory.", process.virtual_bytes},
        {"process_open_fds", "Open file descriptors.", process.open_fds},
        {"process_max_fds", "Largest number of open file descriptors.", process.max_fds},
        {"process_threads", "Threads.", process.threads},
    };
    for (const auto& [name, help, value] : gauges) Show(Gauge(name, help).AddSeries({}, value));
  }

  const Snapshot& all_;
  std::vector<prometheus::MetricFamily> families_;
};

json ModelJson(const ModelStats& model) {
  json out = model;
  out["bytes"] = json::object();
  for (const auto& [device, held] : model.bytes) out["bytes"][device] = held;
  return out;
}

json DeviceJson(const DeviceStats& device) {
  json out = device;
  out["staging_bytes"] = device.staging_lent_bytes + device.staging_kept_bytes;
  out["queued"] = device.queued_requests;
  out["batches"] = device.batch_tokens.total();
  out["tokens"] = device.batch_tokens.sum;
  out["requests"] = device.batch_requests.sum;
  out["kernels"] = json::array();
  for (const KernelStats& kernel : device.kernels) {
    out["kernels"].push_back({{"kernel", kernel.kernel},
                              {"batches", kernel.batches},
                              {"compute_s", absl::ToDoubleSeconds(kernel.compute)}});
  }
  return out;
}

json MethodJson(const MethodStats& method) {
  json codes = json::object();
  for (int code = 0; code < MethodStats::kCodes; ++code) {
    const int64_t calls = method.durations_ns[code].total();
    if (calls > 0) codes[CodeName(code)] = calls;
  }
  const HistogramData all = method.AllDurations();
  return {{"method", method.method},
          {"started", method.started},
          {"codes", codes},
          {"p50", EstimateQuantile(all, 0.5)},
          {"p99", EstimateQuantile(all, 0.99)}};
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
  for (const std::vector<ModelStats>* models : {&snapshot.failed_models, &snapshot.models}) {
    for (const ModelStats& model : *models) out["models"].push_back(ModelJson(model));
  }
  for (const DeviceStats& device : snapshot.devices) out["devices"].push_back(DeviceJson(device));
  if (snapshot.leases) {
    json& leases = out["leases"] = json::array();
    for (const Lease& lease : snapshot.leases->leases) {
      leases.push_back(lease);
      leases.back()["age_s"] = absl::ToDoubleSeconds(snapshot.time - lease.since);
    }
  }
  for (const MethodStats& method : snapshot.methods) {
    if (method.started > 0) out["methods"].push_back(MethodJson(method));
  }
  for (const TimeSeriesPoint& point : points) {
    json entry = point;
    entry["t"] = absl::ToUnixMillis(point.time);
    out["history"].push_back(std::move(entry));
  }
  return out.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace awqd::obs
