// Snapshot: everything that the server counts, at one moment, as plain numbers; TimeSeries: rates
// between snapshots. The rooms that count need not know who shows the numbers, nor the reverse.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "server/obs/gpu_statistics.h"
#include "server/obs/histogram.h"

namespace awqd::obs {

// The calls of one method. All methods that are not in the server's table count as one.
struct MethodStats {
  static constexpr int kCodes = 17;  // gRPC's status codes, OK first

  std::string method;  // "awqd.v1.ServerInfo/GetServerInfo"
  int64_t started = 0;
  std::array<HistogramData, kCodes> durations_ns;  // by code; totals are ended calls
  HistogramData received_bytes, sent_bytes;        // one value for each call
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
  int64_t memory_bytes = 0, free_bytes = 0, weights_bytes = 0;
  int64_t queued_requests = 0;
  int64_t queue_expired = 0, queue_cancelled = 0, queue_full = 0, queue_draining = 0;
  int64_t batches_failed = 0, merged_requests = 0;
  HistogramData batch_tokens, batch_requests, compute_ns;  // one value for each batch
  HistogramData queue_ns;                                  // one value for each request
  std::vector<KernelStats> kernels;
  int64_t staging_lent_bytes = 0, staging_kept_bytes = 0, staging_misses = 0, staging_copied = 0;
};

// A model that is served or being loaded.
struct ModelStats {
  std::string name, state, format;
  float loaded_share = 0;
  int64_t version = 0, weights = 0;
  int64_t requests = 0, failed = 0, tokens = 0;
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

struct Snapshot {
  absl::Time time;
  std::string version;  // awqd's
  bool serving = false;
  std::vector<MethodStats> methods;
  std::vector<DeviceStats> devices;
  std::vector<ModelStats> models;
  HistogramData loads_ns, failed_loads_ns;
  int64_t in_flight_bytes = 0, in_flight_limit_bytes = 0;  // 0: no limit
  int64_t in_flight_refused = 0;
  int64_t turned_away = 0;  // calls that came while the server stopped
  int64_t queue_limit_requests = 0;
  absl::Duration loop_hold_wall, loop_hold_processor;  // the longest in the last minute
  int64_t exported_spans = 0, dropped_spans = 0;
  ProcessStats process;
};

// One point of the page's plots. Rates and averages are over the time since the previous point.
struct TimeSeriesPoint {
  absl::Time time;
  double requests_per_s = 0;  // requests that devices computed
  double tokens_per_s = 0;
  double failed_per_s = 0;        // calls that ended with a code other than OK
  double p50_ms = 0, p99_ms = 0;  // durations of calls that ask for one result
  double batch_tokens = 0;        // average of a batch
  double queue_ms = 0;            // average of a request
  double queued = 0;              // requests that wait now
  double in_flight_bytes = 0;
  double resident_bytes = 0;
  double device_bytes = 0;  // memory in use, all devices together
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

}  // namespace awqd::obs
