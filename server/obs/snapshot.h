// Snapshot: everything that the server counts, at one moment, as plain numbers; TimeSeries: rates
// between snapshots; and their exposition. The rooms that count need not know who shows the numbers, nor the reverse.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/histogram.h"
#include "kernels/base/mutex.h"
#include "server/obs/gpu_statistics.h"

namespace awqd::obs {

// The calls of one method. All methods that are not in the server's table count as one.
struct MethodStats {
  static constexpr int kCodes = 17;  // gRPC's status codes, OK first

  std::string method;  // "awqd.v1.ServerInfo/GetServerInfo"
  int64_t started = 0;
  std::array<HistogramData, kCodes> durations_ns;  // by code; totals are ended calls
  HistogramData received_bytes, sent_bytes;        // one value for each call

  // The calls that ended with any code.
  HistogramData AllDurations() const {
    HistogramData out;
    for (const HistogramData& durations : durations_ns) out.Merge(durations);
    return out;
  }
};

// Batches that ran the same kernel rows.
struct KernelStats {
  std::string kernel;
  int64_t batches = 0;
  absl::Duration compute;
};

struct DeviceStats {
  std::string id, name;
  std::string pci_bus_id;            // empty: the device has none
  std::optional<GpuStatistics> gpu;  // set for /metrics only
  bool healthy = true;
  int64_t memory_bytes = 0, free_bytes = 0;
  int64_t used_bytes = 0;  // that this server holds, weights included
  int64_t weights_bytes = 0;
  int64_t queued_requests = 0;
  int64_t queue_expired = 0, queue_cancelled = 0, queue_full = 0, queue_draining = 0;
  int64_t queue_too_late = 0, queue_too_long = 0;  // refused by batching::BatchQueue's forecast
  int64_t batches_failed = 0, merged_requests = 0;
  HistogramData batch_tokens, batch_requests, compute_ns;  // one value for each batch
  HistogramData queue_ns;                                  // one value for each request
  std::vector<KernelStats> kernels;
  int64_t staging_lent_bytes = 0, staging_kept_bytes = 0, staging_misses = 0, staging_copied = 0;
};

struct ModelStats {
  std::string name, state, format;
  std::string message;  // why its last load failed, or what of it is not served
  float loaded_share = 0;
  int64_t version = 0, weights = 0;
  int64_t unserved_weights = 0;  // quantised weights of the checkpoint that cannot be read
  int64_t requests = 0, failed = 0, tokens = 0;
  int64_t in_time = 0, lost = 0, not_computed = 0;  // of model::ModelStatistics
  absl::Duration queue;
  std::vector<std::pair<std::string, int64_t>> bytes;  // by device
  std::vector<std::string> kernels;                    // its plans' kernels, only when asked for
};

// The process as Linux's /proc describes it; 0 where a value cannot be read.
struct ProcessStats {
  absl::Duration cpu;
  absl::Time started;
  int64_t resident_bytes = 0, virtual_bytes = 0;
  int64_t open_fds = 0, max_fds = 0, threads = 0;
};
ProcessStats ReadProcess();

// The rings of clients on this machine.
struct RingStats {
  int64_t rings = 0, prepared_calls = 0;
  int64_t refused = 0;  // over a limit, or without the right to
  int64_t broken = 0;   // closed because their clients broke the rules
  int64_t sleeps = 0;   // of the thread that polls them
};

// A device's weights of a model that another process maps.
struct Lease {
  std::string model, device;
  int64_t version = 0;  // of the model
  int64_t bytes = 0;    // that are mapped
  std::string client;   // "user 1000, process 4711", after the name of its identity if there is one
  absl::Time since;
};
struct LeaseStats {
  std::vector<Lease> leases;
  int64_t refused = 0;
};

// Memory of GPUs that clients share.
struct SharedDeviceMemoryStats {
  int64_t regions = 0, bytes = 0;
};

struct Snapshot {
  absl::Time time;
  std::string version;  // awqd's
  bool serving = false;
  std::vector<MethodStats> methods;
  std::vector<DeviceStats> devices;
  std::vector<ModelStats> models;         // served or being loaded
  std::vector<ModelStats> failed_models;  // failed, and not served; others are not listed
  int64_t unloaded_models = 0;            // unloaded by a request or while idle
  bool start_models_failed = false;       // a model that was requested at start has failed
  HistogramData loads_ns, failed_loads_ns;
  int64_t in_flight_bytes = 0, in_flight_limit_bytes = 0;  // 0: no limit
  int64_t in_flight_refused = 0;
  int64_t rejected = 0;  // calls that came while the server stopped
  // Connections that were closed or refused since the start, by reason.
  std::vector<std::pair<std::string, int64_t>> refused_connections;
  std::optional<RingStats> rings;    // none without --ring_path
  std::optional<LeaseStats> leases;  // none without --lend
  // None without --cuda_shared_memory.
  std::optional<SharedDeviceMemoryStats> shared_device_memory;
  std::optional<absl::Time> certificate_expiry;  // the server's; none without TLS
  int64_t queue_limit_requests = 0;
  absl::Duration loop_hold_wall, loop_hold_processor;  // the longest in the last minute
  int64_t exported_spans = 0, dropped_spans = 0;
  ProcessStats process;
};

// A quantile of few values is a bound: the end of the histogram's bucket that holds it.
struct Quantile {
  double ms = std::nan("");  // NaN without values
  std::string sign;          // "": an estimate; "≤": an upper bound; ">": a lower bound
};
Quantile EstimateQuantile(const HistogramData& durations_ns, double q);

// One point of the page's plots. Rates and averages are over the time since the previous point.
// Averages and quantiles of nothing are NaN.
struct TimeSeriesPoint {
  absl::Time time;
  double requests_per_s = 0;  // requests that devices computed
  double tokens_per_s = 0;
  double failed_per_s = 0;  // calls that ended with a code other than OK
  // Requests whose clients got a result, that were computed for nobody, and that were refused or
  // expired.
  double in_time_per_s = 0, lost_per_s = 0, refused_per_s = 0;
  Quantile p50, p99;        // durations of calls that ask for one result
  double batch_tokens = 0;  // average of a batch
  double queue_ms = 0;      // average of a request
  double queued = 0;        // requests that wait now
  double in_flight_bytes = 0;
  double resident_bytes = 0;
  double device_bytes = 0;  // that this server holds, all devices together
};

// The points of the last quarter of an hour. Thread-safe.
class TimeSeries {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(5);
  static constexpr absl::Duration kLength = absl::Minutes(15);

  // Adds a point for the time since the previous snapshot, and removes points older than kLength.
  // The first snapshot adds no point.
  void AddSnapshot(const Snapshot& snapshot);
  std::vector<TimeSeriesPoint> points() const;

 private:
  mutable Mutex mu_;
  std::optional<Snapshot> last_ ABSL_GUARDED_BY(mu_);
  std::deque<TimeSeriesPoint> points_ ABSL_GUARDED_BY(mu_);
};

// Durations of the calls that ask for one result: those of the inference services but streams.
HistogramData RequestDurations(const Snapshot& snapshot);

// --- Exposition ---

// The text that Prometheus scrapes. README.md lists names and labels. Labels are methods of the
// server's table, status codes, devices, kernels, and models that are served or being loaded, so
// that clients cannot add series.
std::string PrometheusText(const Snapshot& snapshot);

// One JSON object for the page: version, ready, uptime, limits, models, devices, methods, and the
// history, which is `points`.
std::string StatusJson(const Snapshot& snapshot, const std::vector<TimeSeriesPoint>& points);

}  // namespace awqd::obs
