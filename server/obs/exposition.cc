// Families of metrics, built anew for each scrape; their text is prometheus-cpp's.
#include "server/obs/exposition.h"

#include <sstream>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"

namespace awqd::obs {
namespace {

using Labels = std::vector<std::pair<absl::string_view, absl::string_view>>;

constexpr double kNano = 1e-9;

std::string CodeName(int code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

// One family; series are added in order.
class Family {
 public:
  Family(prometheus::MetricType type, absl::string_view name, absl::string_view help) {
    family_.type = type;
    family_.name = std::string(name);
    family_.help = std::string(help);
  }

  Family& Add(const Labels& labels, double value) {
    prometheus::ClientMetric& metric = New(labels);
    metric.counter.value = metric.gauge.value = value;  // the type says which one is shown
    return *this;
  }
  Family& Add(const Labels& labels, int64_t value) {
    return Add(labels, static_cast<double>(value));
  }
  Family& Add(const Labels& labels, absl::Duration value) {
    return Add(labels, absl::ToDoubleSeconds(value));
  }

  // Values times `unit`. Empty data are of a histogram that was never made.
  Family& Add(const Labels& labels, const HistogramData& data, double unit) {
    prometheus::ClientMetric::Histogram& out = New(labels).histogram;
    uint64_t below = 0;
    for (size_t i = 0; i < data.bounds.size(); ++i) {
      below += static_cast<uint64_t>(data.counts.empty() ? 0 : data.counts[i]);
      out.bucket.push_back({below, static_cast<double>(data.bounds[i]) * unit});
    }
    out.sample_count = static_cast<uint64_t>(data.total());
    out.sample_sum = static_cast<double>(data.sum) * unit;
    return *this;
  }

  prometheus::MetricFamily Take() { return std::move(family_); }

 private:
  prometheus::ClientMetric& New(const Labels& labels) {
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

class Page {
 public:
  explicit Page(const Snapshot& snapshot) : all_(snapshot) {
    Calls();
    Batches();
    Kernels();
    Queue();
    Refusals();
    Models();
    Devices();
    Process();
  }

  std::string Text() const {
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, families_);
    return out.str();
  }

 private:
  void Show(Family family) { families_.push_back(family.Take()); }

  // One series for each device.
  template <typename Value>
  void ShowDevices(Family family, Value value) {
    for (const DeviceStats& device : all_.devices)
      family.Add({{"device", device.id}}, value(device));
    Show(std::move(family));
  }
  void ShowDevices(Family family, HistogramData DeviceStats::*data, double unit) {
    for (const DeviceStats& device : all_.devices) {
      family.Add({{"device", device.id}}, device.*data, unit);
    }
    Show(std::move(family));
  }

  void Calls() {
    Family started = Counter("grpc_server_call_started_total", "Calls that came.");
    Family active = Gauge("awqd_calls_active", "Calls that came and have not ended.");
    Family durations = Histograms("grpc_server_call_duration_seconds",
                                  "Time from a call's arrival until its status was known.");
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
        // 17 codes for each method would be series that nobody ever sees move.
        if (calls == 0 && code != 0) continue;
        durations.Add({{"grpc_method", method.method}, {"grpc_status", CodeName(code)}},
                      method.durations_ns[code], kNano);
      }
      started.Add(name, method.started);
      active.Add(name, method.started - ended);
      received.Add(name, method.received_bytes, 1);
      sent.Add(name, method.sent_bytes, 1);
    }
    for (Family* family : {&started, &active, &durations, &received, &sent}) {
      Show(std::move(*family));
    }
  }

  void Batches() {
    ShowDevices(Histograms("awqd_queue_duration_seconds",
                           "Time that requests waited in the queue of a device."),
                &DeviceStats::queue_ns, kNano);
    ShowDevices(Histograms("awqd_compute_duration_seconds",
                           "Time that a device took for a batch, with copies to and from it."),
                &DeviceStats::compute_ns, kNano);
    ShowDevices(Histograms("awqd_batch_tokens", "Tokens of a batch."), &DeviceStats::batch_tokens,
                1);
    ShowDevices(Histograms("awqd_batch_requests", "Requests that were merged into a batch."),
                &DeviceStats::batch_requests, 1);
    ShowDevices(Counter("awqd_merged_requests_total",
                        "Requests that ran in one batch with at least one other."),
                [](const DeviceStats& device) { return device.merged_requests; });
    ShowDevices(Counter("awqd_batches_failed_total", "Batches that a device could not compute."),
                [](const DeviceStats& device) { return device.batches_failed; });
  }

  void Kernels() {
    Family batches = Counter("awqd_kernel_batches_total", "Batches that ran these kernels.");
    Family time =
        Counter("awqd_kernel_compute_seconds_total", "Time of the batches that ran these kernels.");
    for (const DeviceStats& device : all_.devices) {
      for (const KernelStats& kernel : device.kernels) {
        const Labels labels = {{"device", device.id}, {"kernel", kernel.kernel}};
        batches.Add(labels, kernel.batches);
        time.Add(labels, kernel.compute);
      }
    }
    Show(std::move(batches));
    Show(std::move(time));
  }

  void Queue() {
    ShowDevices(Gauge("awqd_queued_requests", "Requests that wait for a device."),
                [](const DeviceStats& device) { return device.queued_requests; });
    Show(Gauge("awqd_queue_limit_requests", "Requests that may wait for a device.")
             .Add({}, all_.queue_limit_requests));
    Show(Gauge("awqd_in_flight_bytes", "Bytes of requests and answers in flight.")
             .Add({}, all_.in_flight_bytes));
    Show(Gauge("awqd_in_flight_limit_bytes", "Bytes that may be in flight; 0: no limit.")
             .Add({}, all_.in_flight_limit_bytes));
  }

  void Refusals() {
    int64_t full = 0, draining = 0, expired = 0, cancelled = 0;
    for (const DeviceStats& device : all_.devices) {
      full += device.queue_full;
      draining += device.queue_draining;
      expired += device.queue_expired;
      cancelled += device.queue_cancelled;
    }
    Show(Counter("awqd_refused_requests_total", "Requests that were not computed, by reason.")
             .Add({{"reason", "queue_full"}}, full)
             .Add({{"reason", "in_flight_bytes"}}, all_.in_flight_refused)
             .Add({{"reason", "draining"}}, draining + all_.turned_away)
             .Add({{"reason", "deadline_in_queue"}}, expired)
             .Add({{"reason", "cancelled_in_queue"}}, cancelled));
  }

  void Models() {
    Family requests = Counter("awqd_model_requests_total", "Requests that were computed.");
    Family failed = Counter("awqd_model_requests_failed_total", "Requests whose batch failed.");
    Family tokens = Counter("awqd_model_tokens_total", "Tokens that were computed.");
    Family queue = Counter("awqd_model_queue_seconds_total", "Time that requests waited.");
    Family bytes = Gauge("awqd_model_weights_bytes", "Bytes of a model's weights on a device.");
    for (const ModelStats& model : all_.models) {
      const Labels name = {{"model", model.name}};
      requests.Add(name, model.requests);
      failed.Add(name, model.failed);
      tokens.Add(name, model.tokens);
      queue.Add(name, model.queue);
      for (const auto& [device, held] : model.bytes) {
        bytes.Add({{"model", model.name}, {"device", device}}, held);
      }
    }
    for (Family* family : {&requests, &failed, &tokens, &queue, &bytes}) Show(std::move(*family));
    Show(Histograms("awqd_model_load_duration_seconds", "Time of loads, by how they ended.")
             .Add({{"outcome", "ok"}}, all_.loads_ns, kNano)
             .Add({{"outcome", "failed"}}, all_.failed_loads_ns, kNano));
    Show(Gauge("awqd_ready", "1 when every model asked for at start is served.")
             .Add({}, int64_t{all_.serving}));
  }

  void Devices() {
    ShowDevices(Gauge("awqd_device_memory_bytes", "Memory of a device."),
                [](const DeviceStats& device) { return device.memory_bytes; });
    ShowDevices(Gauge("awqd_device_memory_free_bytes", "What awqd may still take of it."),
                [](const DeviceStats& device) { return device.free_bytes; });
    ShowDevices(Gauge("awqd_device_weights_bytes", "Weights of all models on a device."),
                [](const DeviceStats& device) { return device.weights_bytes; });
    ShowDevices(Gauge("awqd_device_faulted", "1 once a device has failed for good."),
                [](const DeviceStats& device) { return int64_t{!device.healthy}; });
    Gpus();
    Family staging = Gauge("awqd_staging_bytes", "Host memory for payloads: in use, or kept.");
    for (const DeviceStats& device : all_.devices) {
      staging.Add({{"device", device.id}, {"state", "in_use"}}, device.staging_lent_bytes);
      staging.Add({{"device", device.id}, {"state", "kept"}}, device.staging_kept_bytes);
    }
    Show(std::move(staging));
    ShowDevices(Counter("awqd_staging_allocations_total", "Buffers that had to be allocated."),
                [](const DeviceStats& device) { return device.staging_misses; });
    ShowDevices(Counter("awqd_staging_copied_bytes_total", "Payload bytes that the host copied."),
                [](const DeviceStats& device) { return device.staging_copied; });
  }

  // Nothing at all where nothing is known.
  void Gpus() {
    Family busy = Gauge("awqd_device_utilization_ratio",
                        "Share of the time in which the GPU ran kernels, of any process.");
    Family used =
        Gauge("awqd_device_memory_used_bytes", "Memory of the GPU that is taken, by any process.");
    bool any = false;
    for (const DeviceStats& device : all_.devices) {
      if (!device.gpu) continue;
      any = true;
      busy.Add({{"device", device.id}}, device.gpu->utilization);
      used.Add({{"device", device.id}}, device.gpu->memory_used_bytes);
    }
    if (!any) return;
    Show(std::move(busy));
    Show(std::move(used));
  }

  void Process() {
    const ProcessStats& process = all_.process;
    Show(Counter("process_cpu_seconds_total", "Processor time of the process.")
             .Add({}, process.cpu));
    Show(
        Gauge("process_resident_memory_bytes", "Resident memory.").Add({}, process.resident_bytes));
    Show(Gauge("process_virtual_memory_bytes", "Virtual memory.").Add({}, process.virtual_bytes));
    Show(Gauge("process_open_fds", "Open file descriptors.").Add({}, process.open_fds));
    Show(Gauge("process_max_fds", "File descriptors that may be open.").Add({}, process.max_fds));
    Show(Gauge("process_threads", "Threads.").Add({}, process.threads));
    Show(Gauge("process_start_time_seconds", "Start of the process, since 1970.")
             .Add({}, process.started - absl::UnixEpoch()));
    Show(Gauge("awqd_loop_longest_hold_seconds",
               "The longest that an event kept a thread from all others in the last minute.")
             .Add({{"clock", "wall"}}, all_.loop_hold_wall)
             .Add({{"clock", "processor"}}, all_.loop_hold_processor));
    Show(Counter("awqd_trace_spans_total", "Spans of traces, by what became of them.")
             .Add({{"outcome", "exported"}}, all_.exported_spans)
             .Add({{"outcome", "dropped"}}, all_.dropped_spans));
    Show(Gauge("awqd_build_info", "1; the version is a label.")
             .Add({{"version", all_.version}}, int64_t{1}));
  }

  const Snapshot& all_;
  std::vector<prometheus::MetricFamily> families_;
};

}  // namespace

std::string PrometheusText(const Snapshot& snapshot) { return Page(snapshot).Text(); }

}  // namespace awqd::obs
